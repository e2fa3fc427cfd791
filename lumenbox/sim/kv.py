"""The simulated model and its KV pool: what a token is depends on every value that really lies in the pages read.

So a page that is lost, foreign, torn or reused too early shows in the tokens that the client gets, as it would in a
real engine.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

from lumenbox.core.requests import SamplingParams

END = 0
VOCABULARY: tuple[bytes, ...] = (
    b"",  # the end token
    *(letter.encode() for letter in "aaabbbcccddeef \n"),
    *(b"ab", b"ba", b"abc", b"cab", b" the", b"bcb"),
    *("é".encode()[:1], "é".encode()[1:], "€".encode()[:1], "€".encode()[1:2], "€".encode()[2:], "🦊".encode()[:2]),
    *("🦊".encode(), "ß".encode(), "日".encode(), b"\xff", b""),
)
"""Text of each token: single letters so that stop strings occur, and pieces of characters so that text is held back."""


def value(token: int, before: Sequence[int]) -> int:
    """K and V of a position: a function of its token and of all positions before it."""
    return hash((token, *before))


def draw(params: SamplingParams, num_generated: int, values: Sequence[int]) -> int:
    """The next token, from the KV of all tokens so far; end tokens are masked before `min_tokens`."""
    noise = hash((params.seed, params.choice, *values))
    while True:
        token = noise % len(VOCABULARY)
        if num_generated >= params.min_tokens or token not in params.end_ids:
            return token
        noise = hash((noise, token))


class KvPool:
    """Slots of values, page by page. It belongs to the worker's slot and outlives every incarnation."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._pages = [[0] * page_size for _ in range(num_pages)]

    def __len__(self) -> int:
        return len(self._pages)

    def read(self, table: Sequence[int], count: int) -> list[int]:
        """Values of the first `count` positions."""
        return [kv for page in table[: -(-count // self.page_size)] for kv in self._pages[page]][:count]

    def compute(self, tokens: Sequence[int], table: Sequence[int], start: int, length: int) -> None:
        """Write the values of positions [start, start + length)."""
        values = self.read(table, start)
        for position in range(start, start + length):
            values.append(value(tokens[position], values))
            self._pages[table[position // self.page_size]][position % self.page_size] = values[-1]

    def fill(self, target: int, values: Sequence[int]) -> None:
        """Write a whole page."""
        self._pages[target][:] = values

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` slots of a page."""
        self._pages[target][:count] = self._pages[source][:count]

    def scramble(self, promised: Collection[tuple[int, int]], noise: random.Random) -> None:
        """A death: whatever no frame vouched for may hold anything. `promised` are (page, number of its slots kept)."""
        kept: dict[int, int] = {}
        for page, count in promised:
            kept[page] = max(count, kept.get(page, 0))
        for page, slots in enumerate(self._pages):
            for slot in range(kept.get(page, 0), self.page_size):
                slots[slot] = noise.getrandbits(60)
