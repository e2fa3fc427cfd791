"""Attention over pages, called by an unmodified transformers model in place of its own.

transformers hands unknown keyword arguments of the forward call down to the attention function: that is how the step
gets here, and nothing is ever kept in a global. Queries are packed over the heads that share a KV head, so that K and V
are read once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from lumenbox.engine.kv_pool import KvPool
from lumenbox.engine.steps import Group, Step

ATTENTION_NAME = "lumenbox_paged"


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    lumenbox_step: Step | None = None,
    lumenbox_pool: KvPool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """`query` [1, H, T, D], `key` and `value` [1, KH, T, D] → [1, T, H, D]. Writes K and V, then attends."""
    if lumenbox_step is None or lumenbox_pool is None:
        raise RuntimeError("this model's attention reads KV pages; run it through lumenbox.engine, not by model(ids)")
    if s_aux is not None:
        raise RuntimeError("attention sinks are not supported")
    step, pool, layer = lumenbox_step, lumenbox_pool, int(module.layer_idx)
    real = step.num_rows
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    out = q.new_zeros(step.total_rows + 1, *q.shape[1:])  # the last row takes what padding rows compute
    pool.write(layer, step.slots.pages, step.slots.offsets, k[:real], v[:real])
    for group in step.groups(sliding_window, q.shape[1] // k.shape[1]):
        attended = _attend(group, q, pool.gather(layer, group.pages), scaling, softcap)
        out.index_copy_(0, group.targets, attended)
    return out[:-1].unsqueeze(0), None


def _attend(
    group: Group, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], scaling: float | None, softcap: float | None
) -> torch.Tensor:
    """One call for all blocks of a group: [B * R, H, D]."""
    blocks, rows = group.rows.shape
    heads, dim, kv_heads = q.shape[1], q.shape[2], kv[0].shape[1]
    packed = q[group.rows.view(-1)].view(blocks, rows, kv_heads, heads // kv_heads, dim)
    packed = packed.transpose(1, 2).reshape(blocks, kv_heads, -1, dim)
    k, v = (tensor.expand(blocks, -1, -1, -1) for tensor in kv)
    if softcap is None:
        out = scaled_dot_product_attention(packed, k, v, attn_mask=group.mask, scale=scaling)
    else:
        scores = _softcapped(packed, k, scaling or dim**-0.5, softcap).add_(group.mask)
        out = scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v
    return out.view(blocks, kv_heads, rows, -1, dim).transpose(1, 2).reshape(blocks * rows, heads, dim)


def _softcapped(q: torch.Tensor, k: torch.Tensor, scaling: float, softcap: float) -> torch.Tensor:
    """Gemma 2: scores squashed into (-softcap, softcap) before the mask; no fused call does that on CPU."""
    return torch.matmul(q, k.transpose(-1, -2)).mul_(scaling / softcap).tanh_().mul_(softcap)


AttentionInterface.register(ATTENTION_NAME, paged_attention)
