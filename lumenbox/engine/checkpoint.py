"""Safetensors files on disk: which ones belong to the model, what their headers promise, and the tensors in them.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON header, then the data
without holes. Files are distrusted: cut downloads, HTML error pages and git-lfs pointers all end in `.safetensors`.
"""

from __future__ import annotations

import json
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lumenbox.errors import ModelError

MAX_HEADER_BYTES = 100_000_000  # the reference implementation's bound
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor in a file: its bytes are [start, stop) of the file."""

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def read(model_dir: Path) -> dict[str, Stored]:
    """All tensors of the model's files, by name."""
    stored: dict[str, Stored] = {}
    for path, wanted in _files(model_dir).items():
        found = read_header(path)
        for name in sorted(wanted - found.keys()):
            raise ModelError(f"{path}: weight {name} is missing, though the index places it there")
        stored.update({name: found[name] for name in wanted or found})
    return stored


def _files(model_dir: Path) -> dict[Path, set[str]]:
    """The files to read, each with the names that the index expects in it (none: all that it holds).

    An index alone decides; else `model.safetensors`; else every file there is. Anything beside them is a stray.
    """
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        return _indexed(index)
    single = model_dir / "model.safetensors"
    found = [single] if single.exists() else sorted(model_dir.glob("*.safetensors"))
    if not found:
        raise ModelError(f"{model_dir}: no model.safetensors in it; lumenbox reads safetensors only")
    return {path: set() for path in found}


def _indexed(index: Path) -> dict[Path, set[str]]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        files: dict[Path, set[str]] = {}
        for name, file in weight_map.items():
            files.setdefault(index.parent / Path(file).name, set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ModelError(f"{index}: not a safetensors index ({error})") from error
    for path in files:
        if not path.exists():
            raise ModelError(f"{path}: missing, though {index.name} names it; the download is incomplete")
    return files


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors that one file promises. Raises ModelError unless they fill the file exactly."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = _header_length(path, file.read(8), size)
            header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        base = 8 + header_bytes
        stored = {name: _stored(name, path, base, fields) for name, fields in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: its safetensors header is damaged") from error
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    _check_tiling(path, stored, base, size)
    return stored


def _header_length(path: Path, prefix: bytes, size: int) -> int:
    if prefix == b"version ":
        raise ModelError(f"{path}: a git-lfs pointer, not the weights; run `git lfs pull`")
    if len(prefix) < 8:
        raise ModelError(f"{path}: {size} bytes, not a safetensors file; download it again")
    (length,) = struct.unpack("<Q", prefix)
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise ModelError(f"{path}: {size} bytes, cut short or not a safetensors file; download it again")
    return int(length)


def _stored(name: str, path: Path, base: int, fields: dict[str, Any]) -> Stored:
    if fields["dtype"] not in DTYPES:
        raise ModelError(f"{path}: weight {name} is stored as {fields['dtype']}; lumenbox reads {', '.join(DTYPES)}")
    start, stop = fields["data_offsets"]
    stored = Stored(name, path, DTYPES[fields["dtype"]], tuple(fields["shape"]), base + start, base + stop)
    if torch.Size(stored.shape).numel() * stored.dtype.itemsize != stop - start:
        raise ValueError(name)
    return stored


def _check_tiling(path: Path, stored: dict[str, Stored], base: int, size: int) -> None:
    at = base
    for tensor in sorted(stored.values(), key=lambda tensor: (tensor.start, tensor.stop)):
        if tensor.start != at:
            raise ModelError(f"{path}: its header leaves a hole before {tensor.name}; the file is damaged")
        at = tensor.stop
    if at != size:
        raise ModelError(f"{path}: {size} bytes where its header promises {at}; download it again")


class Reader:
    """Maps each file once, privately, and hands out tensors over the mapping."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def tensor(self, stored: Stored) -> torch.Tensor:
        """The stored numbers. Read-only by convention: the mapping is private, a write would not reach the file."""
        shape = torch.Size(stored.shape)
        if not shape.numel():
            return torch.empty(shape, dtype=stored.dtype)
        memory, offset = self._map(stored.path), stored.start
        if offset % stored.dtype.itemsize:  # an old writer's unaligned header
            memory, offset = bytearray(memory[stored.start : stored.stop]), 0
        return torch.frombuffer(memory, dtype=stored.dtype, count=shape.numel(), offset=offset).view(shape)

    def _map(self, path: Path) -> Any:
        if path not in self._maps:
            with path.open("rb") as file:
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[path]
