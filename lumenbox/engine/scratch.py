"""A pool and sequences for proofs: private memory that goes when they go."""

from __future__ import annotations

import os
import random

from lumenbox.core.batching import Sequence
from lumenbox.core.requests import SamplingParams
from lumenbox.engine.kv_pool import KvPool
from lumenbox.memory import segment
from lumenbox.memory.layout import PageLayout

SEQUENCES = 4


class ScratchPool(KvPool):
    """A pool that hands out its own pages, in order."""

    def __init__(self, page: PageLayout, tokens: int) -> None:
        """Room for `tokens` tokens in up to SEQUENCES sequences."""
        fd = segment.create("lumenbox-scratch", (-(-tokens // page.page_size) + SEQUENCES) * page.page_bytes)
        try:
            super().__init__(fd, page)
        finally:
            os.close(fd)
        self._next = 0

    def sequence(self, length: int, vocabulary: int, seed: int) -> Sequence:
        """A greedy request of `length` random tokens, its pages taken; the seed is its id."""
        draw, count = random.Random(seed), -(-length // self.page_size)
        tokens = [draw.randrange(vocabulary) for _ in range(length)]
        pages = list(range(self._next, self._next + count))
        self._next += count
        return Sequence(seed, 0, SamplingParams(max_tokens=1, temperature=0.0), tokens, length, pages)
