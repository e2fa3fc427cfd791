"""From a folder of safetensors to one shared segment, and from the segment to a model.

`plan` reads headers only and refuses what cannot be whole; `fill` copies, converts and checks the numbers; `attach`
binds a model to the segment without copying. A worker only ever attaches.
"""

from __future__ import annotations

import hashlib
import mmap
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lumenbox.engine import architecture, checkpoint
from lumenbox.engine.checkpoint import Stored
from lumenbox.errors import ModelError
from lumenbox.memory import segment
from lumenbox.memory.layout import WeightEntry

ALIGNMENT = 64  # bytes; a cache line, and what vector loads like


@dataclass(frozen=True, slots=True)
class Plan:
    """What will lie where in the segment. `pieces[name]` are the stored tensors of one parameter, in order."""

    entries: tuple[WeightEntry, ...]
    pieces: dict[str, tuple[Stored, ...]]
    tied: tuple[tuple[str, Stored], ...]
    total_bytes: int
    dtype: str


def plan(model_dir: Path, dtype: str) -> Plan:
    """Match the stored tensors with the model's parameters, by headers alone. Raises ModelError with one line."""
    config = architecture.read_config(model_dir)
    dtype = choose_dtype(config, dtype)
    model = architecture.meta_model(config, dtype)
    stored = checkpoint.read(model_dir)
    ties = architecture.ties(model)
    parameters = {name: p for name, p in model.named_parameters(remove_duplicate=False) if name not in ties}
    pieces = {name: _find_pieces(name, tuple(p.shape), stored, model_dir) for name, p in parameters.items()}
    _refuse_leftovers(model, pieces, stored, ties)
    entries, total = _lay_out({name: tuple(p.shape) for name, p in parameters.items()}, ties, dtype)
    tied = tuple((source, stored[name]) for name, source in ties.items() if name in stored)
    return Plan(entries, pieces, tied, total, dtype)


def choose_dtype(config: Any, asked: str) -> str:
    """`auto`: the checkpoint's dtype where the processor computes in it, else float32."""
    if asked != "auto":
        if asked not in ("float32", "bfloat16", "float16"):
            raise ModelError(f"--dtype {asked} is unknown; use auto, float32, bfloat16 or float16")
        return asked
    own = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    flags = {"bfloat16": ("avx512_bf16", "amx_bf16"), "float16": ("amx_fp16",)}.get(own, ())
    return own if any(flag in cpu_flags() for flag in flags) else "float32"


def cpu_flags() -> frozenset[str]:
    """The instruction sets that the kernel reports for the first processor (x86 `flags`, ARM `Features`)."""
    text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def fill(plan: Plan, fd: int) -> str:
    """Copy all weights into the segment, check every number, and return the hex digest of the segment's bytes."""
    memory, reader = segment.attach(fd), checkpoint.Reader()
    owners = {entry.name: _tensor(memory, entry) for entry in plan.entries if entry.name in plan.pieces}
    for name, target in owners.items():
        _copy(target, plan.pieces[name], reader)
        _check_numbers(name, target, plan.pieces[name][0].path)
    for source, copy in plan.tied:
        _check_tie(copy, reader.tensor(copy), owners[source])
    return hashlib.blake2b(
        repr(plan.entries).encode() + _checksum(memory, plan.total_bytes), digest_size=16
    ).hexdigest()


def _checksum(memory: mmap.mmap, size: int) -> bytes:
    """A fast digest of the segment: 64-bit sums of strided words, by torch, at memory speed."""
    words = torch.frombuffer(memory, dtype=torch.int64, count=size // 8)
    stride = 4099  # prime, so that columns drift over rows of any width
    whole = words[: words.numel() // stride * stride].view(-1, stride).sum(0)
    tail = words[words.numel() // stride * stride :]
    return hashlib.blake2b(whole.numpy().tobytes() + tail.numpy().tobytes(), digest_size=16).digest()


def attach(fd: int, entries: tuple[WeightEntry, ...], config: Any) -> torch.nn.Module:
    """Build the model on meta and bind its parameters to the segment: no copy, ties kept, buffers made anew."""
    memory = segment.attach(fd)
    model = architecture.meta_model(config, entries[0].dtype)
    architecture.rebuild_buffers(model)  # first: it re-initialises parameters beside them, which are still on meta
    bound: dict[int, torch.nn.Parameter] = {}
    for entry in entries:
        if entry.offset not in bound:
            bound[entry.offset] = torch.nn.Parameter(_tensor(memory, entry), requires_grad=False)
        owner, _, leaf = entry.name.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = bound[entry.offset]
    return model.requires_grad_(False).eval()


def _lay_out(
    shapes: dict[str, tuple[int, ...]], ties: dict[str, str], dtype: str
) -> tuple[tuple[WeightEntry, ...], int]:
    entries, offset = {}, 0
    for name, shape in shapes.items():
        entries[name] = WeightEntry(name, offset, shape, dtype)
        size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    for name, source in ties.items():
        entries[name] = WeightEntry(name, entries[source].offset, entries[source].shape, dtype)
    return tuple(entries.values()), offset


def _find_pieces(name: str, shape: tuple[int, ...], stored: dict[str, Stored], model_dir: Path) -> tuple[Stored, ...]:
    """The stored tensors of one parameter: itself, or, for fused experts, those of each expert in turn."""
    parts = [name] if name in stored else _expert_parts(name, shape)
    missing = [part for part in parts or [name] if part not in stored]
    if missing:
        raise ModelError(f"{model_dir}: weight {missing[0]} is missing; incomplete, or not the model of config.json")
    pieces = tuple(stored[part] for part in parts)
    numbers = sum(torch.Size(piece.shape).numel() for piece in pieces)
    if (len(pieces) == 1 and pieces[0].shape != shape) or numbers != torch.Size(shape).numel():
        found = pieces[0].shape if len(pieces) == 1 else f"{len(pieces)} parts of {pieces[0].shape}"
        raise ModelError(f"{pieces[0].path}: weight {name} has shape {found}, config.json says {shape}")
    return pieces


def _expert_parts(name: str, shape: tuple[int, ...]) -> list[str]:
    """transformers fuses `experts.0.gate_proj.weight`, `experts.0.up_proj.weight`, … into `experts.gate_up_proj`."""
    stem, _, leaf = name.rpartition(".")
    if not stem.endswith("experts"):
        return []
    projections = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
    return [f"{stem}.{expert}.{projection}.weight" for expert in range(shape[0]) for projection in projections]


def _refuse_leftovers(
    model: Any, pieces: dict[str, tuple[Stored, ...]], stored: dict[str, Stored], ties: dict[str, str]
) -> None:
    """A weight without a place means that config.json describes another model (fewer layers, say)."""
    used = {piece.name for group in pieces.values() for piece in group} | set(ties)
    ignored = [
        *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
        r"rotary_emb\.inv_freq$",
        r"masked_bias$",
    ]
    for name in stored.keys() - used:
        if not any(re.search(pattern, name) for pattern in ignored):
            raise ModelError(f"{stored[name].path}: weight {name} has no place in the model that config.json describes")


def _tensor(memory: mmap.mmap, entry: WeightEntry) -> torch.Tensor:
    dtype, shape = getattr(torch, entry.dtype), torch.Size(entry.shape)
    return torch.frombuffer(memory, dtype=dtype, count=shape.numel(), offset=entry.offset).view(shape)


def _copy(target: torch.Tensor, pieces: tuple[Stored, ...], reader: checkpoint.Reader) -> None:
    flat, at = target.view(-1), 0
    for piece in pieces:
        source = reader.tensor(piece).view(-1)
        flat[at : at + source.numel()].copy_(source)
        at += source.numel()


def _check_numbers(name: str, tensor: torch.Tensor, path: Path) -> None:
    low, high = (float(bound) for bound in torch.aminmax(tensor))
    if not (low > float("-inf") and high < float("inf")):
        raise ModelError(f"{path}: weight {name} holds NaN or infinite numbers; the file is damaged")
    if low == high == 0.0 and tensor.ndim > 1:
        raise ModelError(f"{path}: weight {name} is all zeros ({tensor.nbytes} bytes); the download is incomplete")


def _check_tie(stored: Stored, values: torch.Tensor, target: torch.Tensor) -> None:
    """A stored copy of a tied weight is fine if it is a copy; else the tie in config.json is wrong."""
    if values.shape != target.shape or not torch.equal(values.to(target.dtype), target):
        raise ModelError(f"{stored.path}: {stored.name} differs from the weight that config.json ties it to")
