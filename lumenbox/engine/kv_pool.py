"""A worker's KV pages as tensors over the shared segment. Nothing here knows requests: only pages and their slots.

Inside a page each layer has one run `[page_size, 2, kv_heads, head_dim]`: a token's K and V lie side by side, so that
one gather fetches both, one scatter writes both, and the first n tokens of a page are one run of bytes per layer.
"""

from __future__ import annotations

from typing import Any

import torch

from lumenbox.errors import ModelError
from lumenbox.memory import segment
from lumenbox.memory.layout import LayerSlice, PageLayout


def page_layout(config: Any, dtype: str, page_size: int) -> PageLayout:
    """How one page of `page_size` tokens lies over all layers of a model with this (text) config."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    run = page_size * 2 * heads * dim * getattr(torch, dtype).itemsize
    layers = tuple(LayerSlice(index * run, heads, dim) for index in range(config.num_hidden_layers))
    return PageLayout(page_size, run * len(layers), dtype, layers)


class KvPool:
    """All pages of one segment. `layers[i]` is layer i's view `[num_pages, page_size * 2 * kv_heads * head_dim]`."""

    def __init__(self, fd: int, layout: PageLayout) -> None:
        self.layout = layout
        self.page_size = layout.page_size
        memory = segment.attach(fd)
        self.num_pages = len(memory) // layout.page_bytes
        used = self.num_pages * layout.page_bytes
        if not used:
            raise ModelError(f"the KV pool of {len(memory)} bytes holds no page of {layout.page_bytes} bytes")
        dtype = getattr(torch, layout.dtype)
        self.pages = torch.frombuffer(memory, dtype=dtype, count=used // dtype.itemsize).view(self.num_pages, -1)
        self.layers = [self._layer(piece, dtype.itemsize) for piece in layout.layers]
        self._memory = memoryview(memory)
        self._gathered = self.pages.new_empty(0)

    def _layer(self, piece: LayerSlice, itemsize: int) -> torch.Tensor:
        start, size = piece.offset // itemsize, self.page_size * 2 * piece.kv_heads * piece.head_dim
        return self.pages[:, start : start + size]

    def write(self, layer: int, pages: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put rows `k`, `v` `[rows, kv_heads, head_dim]` into slot `offsets[i]` of page `pages[i]`."""
        slots = self.layers[layer].view(self.num_pages, self.page_size, 2, *k.shape[1:])
        slots.index_put_((pages, offsets), torch.stack((k, v), dim=1))

    def gather(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of `pages` `[rows, n]` (int64), each `[rows, kv_heads, n * page_size, head_dim]`.

        The result lives in a buffer that the next gather overwrites: fresh memory for each layer doubles the cost.
        """
        piece = self.layout.layers[layer]
        source, rows = self.layers[layer], pages.shape[0]
        out = self._buffer(pages.numel() * source.shape[1]).view(-1, source.shape[1])
        torch.index_select(source, 0, pages.view(-1), out=out)
        kv = out.view(rows, -1, 2, piece.kv_heads, piece.head_dim).permute(2, 0, 3, 1, 4)
        return kv[0], kv[1]

    def _buffer(self, size: int) -> torch.Tensor:
        if self._gathered.numel() < size:
            self._gathered = self.pages.new_empty(size)
        return self._gathered[:size]

    def page_bytes(self, page: int) -> memoryview:
        """The bytes of one page, all layers: what a KV checkpoint stores."""
        size = self.layout.page_bytes
        return self._memory[page * size : (page + 1) * size]

    def clear_tail(self, page: int, tokens: int) -> None:
        """Zero the slots of `page` from `tokens` on. A foreign NaN in a masked slot would spread: 0 * NaN is NaN."""
        for view in self.layers:
            view[page].view(self.page_size, -1)[tokens:].zero_()

    def copy_page(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` tokens of a page in all layers and clear the rest (re-attach)."""
        for view in self.layers:
            view[target].view(self.page_size, -1)[:tokens].copy_(view[source].view(self.page_size, -1)[:tokens])
        self.clear_tail(target, tokens)
