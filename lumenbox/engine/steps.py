"""One engine step as index tensors: which rows attend to which pages. Prepared once per step, used by every layer.

The unit is a **block**: query rows of one sequence inside one absolute block of positions. How a block is computed is
a function of its positions alone (DESIGN §9): the first page, the number of pages and the number of padded rows. Blocks
of equal shape are stacked into a **group**, which is one gather and one attention call.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from lumenbox.core.batching import Batch, Chunk

ROWS = 16  # a packed block of 16 rows never left a tail that changes bits (FACTS.md)
FAST_BLOCK = 128  # positions in a block where bits need not be kept


@dataclass(frozen=True, slots=True)
class Rule:
    """How rows are cut and padded. `min_rows`: the fewest rows with which a matrix product is called."""

    page_size: int
    exact: bool
    min_rows: int = 1

    @property
    def block(self) -> int:
        return self.page_size if self.exact else FAST_BLOCK

    def padded_rows(self, rows: int, group_size: int) -> int:
        """Query rows in the call. Packed over the `group_size` heads of a KV head, 4 or more keep their bits."""
        if rows > 1:
            return self.page_size if self.exact else -(-rows // ROWS) * ROWS
        return -(-4 // group_size) if self.exact else 1


def page_bucket(pages: int) -> int:
    """The extent, in pages, that stands for `pages`: at most a quarter more, so that few shapes exist and batch well.

    1 2 3 4 5 6 7 8 10 12 14 16 20 24 28 32 40 …
    """
    grain = 1 << max(0, pages.bit_length() - 3)
    return -(-pages // grain) * grain


@dataclass(slots=True)
class Block:
    """Rows [row, row + rows) of the step, at positions [start, start + rows) of chunk number `chunk`."""

    chunk: int
    row: int
    start: int
    rows: int
    page_table: list[int]

    def span(self, rule: Rule, window: int | None) -> tuple[int, int]:
        """First page and number of pages to gather: from where the window of the first row's page begins to the end."""
        block_start = self.start // rule.page_size * rule.page_size
        first = max(0, block_start - window + 1) // rule.page_size if window else 0
        return first, page_bucket((self.start + self.rows - 1) // rule.page_size - first + 1)


class Shape(NamedTuple):
    """What blocks share that are computed in one call. `source`: (chunk, first page), None for single rows."""

    source: tuple[int, int] | None
    pages: int
    rows: int


@dataclass(slots=True)
class Group:
    """Blocks of one shape. `rows` [B, R] are the step's rows to read, `targets` [B * R] those to write (padding rows
    go to the trash row, behind the last).

    `pages` is [B, n], or [1, n] where all blocks read the same pages. `mask` is [B, 1, R * group_size, n * page_size],
    additive, in the model's dtype.
    """

    rows: torch.Tensor
    targets: torch.Tensor
    pages: torch.Tensor
    mask: torch.Tensor


@dataclass(slots=True)
class Slots:
    """Where a step's rows lie: page and offset of each real row."""

    pages: torch.Tensor
    offsets: torch.Tensor


@dataclass
class Step:
    """What travels as a keyword argument through the model's forward call to our attention."""

    batch: Batch
    rule: Rule
    dtype: torch.dtype
    _groups: dict[tuple[int | None, int], list[Group]] = field(default_factory=dict)

    @cached_property
    def num_rows(self) -> int:
        """Real rows, without padding."""
        return sum(chunk.length for chunk in self.batch.chunks)

    @cached_property
    def total_rows(self) -> int:
        return max(self.num_rows, self.rule.min_rows)

    @cached_property
    def positions(self) -> np.ndarray:
        """Position of each row, int64 [total_rows]; padding rows stand at 0."""
        positions = np.zeros(self.total_rows, np.int64)
        positions[: self.num_rows] = np.concatenate([np.arange(c.start, c.start + c.length) for c in self.batch.chunks])
        return positions

    @cached_property
    def token_ids(self) -> np.ndarray:
        ids = np.zeros(self.total_rows, np.int64)
        ids[: self.num_rows] = [t for c in self.batch.chunks for t in c.seq.tokens[c.start : c.start + c.length]]
        return ids

    @cached_property
    def sample_rows(self) -> list[int]:
        """The step rows whose logits are wanted, one for each sampling chunk."""
        ends = np.cumsum([chunk.length for chunk in self.batch.chunks])
        return [int(end) - 1 for end, chunk in zip(ends, self.batch.chunks, strict=True) if chunk.samples]

    @cached_property
    def slots(self) -> Slots:
        page, positions = self.rule.page_size, self.positions[: self.num_rows]
        pages = [self._pages_of(chunk) for chunk in self.batch.chunks]
        return Slots(torch.from_numpy(np.concatenate(pages)), torch.from_numpy(positions % page))

    def _pages_of(self, chunk: Chunk) -> np.ndarray:
        page = self.rule.page_size
        first, last = chunk.start // page, (chunk.start + chunk.length - 1) // page
        table = np.array(chunk.seq.page_table[first : last + 1], np.int64)
        return table[np.arange(chunk.start, chunk.start + chunk.length) // page - first]

    @cached_property
    def opened_pages(self) -> list[tuple[int, int]]:
        """Pages that this step begins and does not fill, each with the number of tokens it then holds."""
        page, opened = self.rule.page_size, []
        for chunk in self.batch.chunks:
            end = chunk.start + chunk.length
            last = (end - 1) // page
            if end % page and chunk.start <= last * page:
                opened.append((chunk.seq.page_table[last], end % page))
        return opened

    @cached_property
    def blocks(self) -> list[Block]:
        """All chunks cut at absolute multiples of the rule's block."""
        blocks, row, size = [], 0, self.rule.block
        for number, chunk in enumerate(self.batch.chunks):
            at, end = chunk.start, chunk.start + chunk.length
            while at < end:
                rows = min(end, (at // size + 1) * size) - at
                blocks.append(Block(number, row, at, rows, chunk.seq.page_table))
                at, row = at + rows, row + rows
        return blocks

    def groups(self, window: int | None, group_size: int) -> list[Group]:
        """The calls of a layer with this sliding window and this many query heads a KV head."""
        key = (window, group_size)
        if key not in self._groups:
            self._groups[key] = [
                self._group(blocks, shape, window, group_size)
                for shape, blocks in self._shapes(window, group_size).items()
            ]
        return self._groups[key]

    def _shapes(self, window: int | None, group_size: int) -> dict[Shape, list[Block]]:
        """Blocks by shape. Rows that decode are stacked; blocks of a chunk that start at one page share its gather."""
        shapes = defaultdict(list)
        for block in self.blocks:
            first, pages = block.span(self.rule, window)
            rows = self.rule.padded_rows(block.rows, group_size)
            source = None if block.rows == 1 else (block.chunk, first)
            shapes[Shape(source, pages, rows)].append(block)
        return shapes

    def _group(self, blocks: list[Block], shape: Shape, window: int | None, group_size: int) -> Group:
        page = self.rule.page_size
        index = np.array([[b.row + (r if r < b.rows else 0) for r in range(shape.rows)] for b in blocks])
        targets = np.array([[b.row + r if r < b.rows else self.total_rows for r in range(shape.rows)] for b in blocks])
        firsts = [b.span(self.rule, window)[0] for b in blocks]
        tables = [_padded_table(b, first, shape.pages, page) for b, first in zip(blocks, firsts, strict=True)]
        keys = np.array(firsts)[:, None, None] * page + np.arange(shape.pages * page)
        at = self.positions[index][:, :, None]
        visible = (keys <= at) & (keys > at - window) if window else keys <= at
        return Group(
            torch.from_numpy(index),
            torch.from_numpy(targets.reshape(-1)),
            torch.tensor(tables if shape.source is None else tables[-1:]),
            _additive(visible, group_size, self.dtype),
        )


def _padded_table(block: Block, first: int, pages: int, page_size: int) -> list[int]:
    """`pages` pages from `first` on. Behind the block's last position the first page stands in, masked: a page that is
    not written yet may hold a foreign NaN, and 0 * NaN is NaN."""
    table = block.page_table[first : (block.start + block.rows - 1) // page_size + 1]
    return table + table[:1] * (pages - len(table))


def _additive(visible: np.ndarray, group_size: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, R, E] of bool → [B, 1, R * group_size, E]: 0 where visible, -inf elsewhere."""
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(torch.from_numpy(~visible), float("-inf"))
    return mask.repeat_interleave(group_size, dim=1).unsqueeze(1)
