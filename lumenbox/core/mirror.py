"""The coordinator's picture of one worker's KV pool, moved on by each frame and by nothing else.

It is what a re-attach starts from: shared memory holds bytes only, all metadata is here (DESIGN §2.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from lumenbox.core.pages import PageHash


class PoolChanges(Protocol):
    """What a frame says about pages: the fields of batching.Report that concern them."""

    @property
    def admitted(self) -> Sequence[tuple[int, int, int]]: ...
    @property
    def progress(self) -> Sequence[tuple[int, int]]: ...
    @property
    def taken(self) -> Sequence[tuple[int, list[int]]]: ...
    @property
    def hashed(self) -> Sequence[tuple[int, PageHash]]: ...
    @property
    def evicted(self) -> Sequence[int]: ...
    @property
    def preempted(self) -> Sequence[int]: ...
    @property
    def finished(self) -> Sequence[tuple[int, int, str]]: ...
    @property
    def dropped(self) -> Sequence[tuple[int, int]]: ...
    @property
    def replaced(self) -> Sequence[tuple[int, int, int]]: ...


class PoolMirror:
    """Page tables by request, how far each is computed, and which pages the prefix cache knows."""

    def __init__(self) -> None:
        self.tables: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.hashes: dict[int, PageHash] = {}
        self._whole: dict[int, int] = {}

    def apply(self, report: PoolChanges) -> None:
        """Move on by one whole frame."""
        for rid, _ in report.dropped:
            self.release(rid)
        for rid, _, cached in report.admitted:
            self.tables.setdefault(rid, [])
            self.computed[rid] = cached
        for rid, index, page in report.replaced:
            self.tables[rid][index] = page
        for rid, pages in report.taken:
            self.tables[rid].extend(pages)
        for rid in report.preempted:
            self.release(rid)
        for page in report.evicted:
            del self.hashes[page]
        self.hashes.update(report.hashed)
        for rid, computed in report.progress:
            self.computed[rid] = computed
        for rid, _, _ in report.finished:
            self.release(rid)

    def sampled(self, rid: int, num_tokens: int) -> None:
        """A request holds `num_tokens` tokens after a draw: KV exists for all but the last (case B03)."""
        if rid in self.computed:
            self.computed[rid] = num_tokens - 1

    def crossings(self, rids: Iterable[int], page_size: int) -> Iterator[tuple[int, int]]:
        """(request, whole pages) for those of `rids` that completed a page since this was asked last."""
        for rid in rids:
            whole = self.computed.get(rid, 0) // page_size
            if whole > self._whole.get(rid, 0):
                self._whole[rid] = whole
                yield rid, whole

    def release(self, rid: int) -> None:
        """The request left the pool, by its end, a preemption or a move."""
        self._whole.pop(rid, None)
        self.tables.pop(rid, None)
        self.computed.pop(rid, None)

    def keep_only(self, rids: set[int]) -> None:
        """What the next incarnation starts from: the requests that come back to it, and the prefix cache."""
        for rid in [r for r in self.tables if r not in rids]:
            self.release(rid)

    def clear(self) -> None:
        """The pool is gone."""
        self.keep_only(set())
        self.hashes.clear()

    @property
    def pages_used(self) -> int:
        """Distinct pages that requests refer to."""
        return len({page for table in self.tables.values() for page in table})

    @property
    def pages_cached(self) -> int:
        """Pages that only the prefix cache refers to."""
        used = {page for table in self.tables.values() for page in table}
        return sum(1 for page in self.hashes if page not in used)
