"""The header of a .safetensors file, checked against the file's size before a byte of weights is read.

The library refuses broken files too, but without naming them, and only when a worker is already loading.
Format: 8 bytes little-endian header length, that much JSON {name: {dtype, shape, data_offsets}}, then the data.
"""

from __future__ import annotations

import json
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lumenbox.errors import ModelError

# The library's own bound.
MAX_HEADER_BYTES = 100_000_000
BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8}
BITS |= {"F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
BITS |= {"I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32}
BITS |= {"I64": 64, "U64": 64, "F64": 64, "C64": 64}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: `start` and `end` are byte positions in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """All tensors of one file, in the order of their bytes."""

    path: Path
    tensors: tuple[TensorEntry, ...]
    file_bytes: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of tensor data."""
        return sum(tensor.end - tensor.start for tensor in self.tensors)


def read_header(path: Path) -> Header:
    """Read and check one file's header. Raises ModelError with the file's path and the sizes at odds."""
    raw = read_json_header(path)
    named = ((name, fields) for name, fields in raw.fields.items() if name != "__metadata__")
    entries = [tensor_entry(path, name, fields, raw.end) for name, fields in named]
    entries.sort(key=lambda entry: (entry.start, entry.end))
    require_exact_cover(path, entries, raw.end, raw.file_bytes)
    return Header(path, tuple(entries), raw.file_bytes)


@dataclass(frozen=True)
class RawHeader:
    """The header's JSON, where it ends, and where the file ends."""

    fields: dict[str, Any]
    end: int
    file_bytes: int


def read_json_header(path: Path) -> RawHeader:
    """The JSON at the start of the file, with the two positions that everything is checked against."""
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise ModelError(f"{path} is not a regular file")
        with path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if total < 8 or not 2 <= length <= min(total - 8, MAX_HEADER_BYTES):
                raise ModelError(
                    f"{path} is not a whole safetensors file: it has {total} bytes, its header claims {length}"
                )
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ModelError(f"{path} is not a safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise ModelError(f"{path} is not a safetensors file: its header is no JSON object")
    return RawHeader(header, 8 + length, total)


def tensor_entry(path: Path, name: str, fields: Any, data_start: int) -> TensorEntry:
    """One entry of the header, its byte range fitting its dtype and shape."""
    match fields:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(end)]} if dtype in BITS and all(
            isinstance(length, int) and length >= 0 for length in shape
        ):
            needed = math.prod(shape) * BITS[dtype] // 8
        case _:
            raise ModelError(f"{path} has a header entry that cannot be read: {name}")
    if end - start != needed or start < 0:
        raise ModelError(f"{path}: tensor {name} needs {needed} bytes, the header gives it {end - start}")
    return TensorEntry(name, dtype, tuple(shape), data_start + start, data_start + end)


def require_exact_cover(path: Path, entries: list[TensorEntry], data_start: int, file_bytes: int) -> None:
    """The tensors' ranges must fill the file without a hole, an overlap or a rest."""
    if not entries:
        raise ModelError(f"{path} holds no tensors")
    at = data_start
    for entry in entries:
        if entry.start != at:
            raise ModelError(f"{path}: tensor {entry.name} starts at byte {entry.start}, expected {at}")
        at = entry.end
    if at != file_bytes:
        raise ModelError(f"{path} has {file_bytes} bytes, its header describes {at}: the file is damaged or incomplete")
