"""Whose sealed pages a worker loads first."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

import pytest

from lumenbox.core.batching import BatchScheduler
from lumenbox.core.requests import SamplingParams
from lumenbox.memory.arena import Arena
from lumenbox.wire import frames
from lumenbox.worker import checkpoints
from lumenbox.worker.checkpoints import KvCheckpoints, sequence
from lumenbox.worker.faults import Faults

SIZE = 4
PAGE_BYTES = 8


class Pool:
    """As much of a KvPool as is needed to load pages."""

    def __init__(self, pages: int) -> None:
        self._memory = memoryview(bytearray(pages * PAGE_BYTES))

    def page_bytes(self, page: int) -> memoryview:
        return self._memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]


class Heir:
    """A worker with so many pages; every page in its arena is sound."""

    def __init__(self, fd: int, pages: int) -> None:
        self.scheduler = BatchScheduler(pages, SIZE, 4, 64, 64)
        self._arena = Arena(fd, PAGE_BYTES)
        self.checkpoints = KvCheckpoints(self._arena, Pool(pages), Faults([], 0, 1))  # type: ignore[arg-type]

    def placed(self, rid: int, pages: int) -> frames.Placed:
        page = memoryview(bytes([rid]) * PAGE_BYTES)
        for slot in range(10 * rid, 10 * rid + pages):
            self._arena.write(slot, page)
        return frames.Placed(
            rid=rid,
            epoch=1,
            params=SamplingParams(max_tokens=4),
            tokens=[rid] * (SIZE * pages + 1),
            num_prompt=SIZE * pages,
            priority=0,
            slots=[(10 * rid + index,) for index in range(pages)],
            sealed=pages,
            crcs=[zlib.crc32(page)] * pages,
        )

    def interrupted(self, rid: int, pages: int) -> None:
        self.scheduler.add(sequence(self.placed(rid, pages)))

    def sent_ahead(self, rid: int, pages: int) -> None:
        self.checkpoints.obey(self.scheduler, frames.Preload(self.placed(rid, pages)))

    def loads(self) -> list[tuple[int, int]]:
        """(request, pages) in the order in which they were loaded."""
        self.checkpoints.restore_some(self.scheduler, 0.0)
        return [(rid, pages) for rid, _, pages, _, _ in self.checkpoints.collect(self.scheduler).restored]


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("arena")
    yield fd
    os.close(fd)


def test_who_waits_goes_before_what_is_sent_ahead(fd: int) -> None:
    heir = Heir(fd, pages=20)
    heir.sent_ahead(1, pages=2)
    heir.interrupted(2, pages=3)
    heir.interrupted(3, pages=1)
    assert heir.loads() == [(3, 1), (2, 3), (1, 2)]


def test_what_is_sent_ahead_does_not_wait_behind_one_that_waits_for_pages(fd: int) -> None:
    heir = Heir(fd, pages=6)
    held = heir.scheduler.pool.take(2)
    assert held is not None
    heir.interrupted(2, pages=5)
    heir.sent_ahead(1, pages=2)
    assert heir.loads() == [(1, 2)]


def test_what_is_sent_ahead_and_can_never_come_is_given_up(fd: int) -> None:
    """Then its request stays where it is."""
    heir = Heir(fd, pages=3)
    heir.sent_ahead(1, pages=4)
    assert heir.loads() == [(1, 0)]


# -- a page at a time: steps of the others, and commands, come in between ---------------------------------------------


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "RESTORE_SLICE_S", 0.0)


@pytest.mark.usefixtures("slowly")
def test_residents_wait_for_a_page_at_a_time(fd: int) -> None:
    heir = Heir(fd, pages=20)
    heir.interrupted(1, pages=3)
    assert [heir.loads() for _ in range(4)] == [[], [], [(1, 3)], []]
    assert heir.checkpoints.has_news is False
    heir.scheduler.check()


@pytest.mark.usefixtures("slowly")
def test_the_pages_before_the_loaded_ones_are_kept_meanwhile(fd: int) -> None:
    """What the prefix cache had of it may not be evicted between two slices."""
    heir = Heir(fd, pages=6)
    heir.sent_ahead(1, pages=2)
    assert [heir.loads() for _ in range(2)] == [[], [(1, 2)]]
    heir.interrupted(1, pages=4)
    heir.loads()
    heir.scheduler.pool.evict_until(6)
    heir.scheduler.check()
    assert heir.loads() == [(1, 4)]
    assert len(heir.scheduler.pool.lookup(heir.scheduler.waiting[0].hashes)) == 4


@pytest.mark.usefixtures("slowly")
@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_cancel_in_the_middle_leaves_what_is_there_as_prefix_cache(fd: int, is_ahead: bool) -> None:
    heir = Heir(fd, pages=20)
    (heir.sent_ahead if is_ahead else heir.interrupted)(1, pages=3)
    heir.loads()
    heir.checkpoints.cancel(heir.scheduler, 1, 0)
    assert heir.checkpoints.has_news, "another epoch's cancel changes nothing"
    heir.checkpoints.cancel(heir.scheduler, 1, 1)
    assert heir.scheduler.drop(1, 1) is not is_ahead
    heir.scheduler.check()
    assert (heir.loads(), heir.checkpoints.has_news, heir.scheduler.pool.num_cached) == ([], False, 1)


@pytest.mark.usefixtures("slowly")
@pytest.mark.parametrize("slices", [0, 1])
def test_slots_that_are_taken_away_are_read_no_more(fd: int, slices: int) -> None:
    heir = Heir(fd, pages=20)
    heir.interrupted(1, pages=3)
    for _ in range(slices):
        heir.loads()
    heir.checkpoints.obey(heir.scheduler, frames.Release(1, 1))
    assert heir.loads() == [(1, slices)]
    heir.scheduler.check()
    assert heir.loads() == []


def test_a_bad_page_ends_the_prefix(fd: int) -> None:
    heir = Heir(fd, pages=20)
    heir.interrupted(1, pages=3)
    Arena(fd, PAGE_BYTES).flip_byte(11)
    assert heir.loads() == [(1, 1)]
    assert heir.scheduler.waiting[0].num_sealing == 1
    heir.scheduler.check()
