"""A simulated worker's side of KV checkpoints: what `worker/checkpoints.py` and `worker/copier.py` do.

The copier is a thread of its own: it goes on while a step computes, or hangs. What it has not told in a frame dies with
the worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lumenbox.core.batching import BatchScheduler, Restore, Sequence
from lumenbox.sim.arena import Arena, Writer, checksum
from lumenbox.sim.clock import Action
from lumenbox.sim.kv import KvPool
from lumenbox.sim.messages import News, Preload, Release, Reserve, SealRate
from lumenbox.sim.scenario import CopyTimes


@dataclass(slots=True, frozen=True, eq=False)
class Copy:
    """One page of one request, to every slot that keeps it."""

    writer: Writer
    index: int
    page: int
    slots: tuple[int, ...]


class KvCheckpoints:
    """`after` schedules something unless the worker is dead or stopped; `passes` tells whether it lives on."""

    def __init__(
        self,
        worker: int,
        times: CopyTimes,
        arena: Arena,
        kv: KvPool,
        after: Callable[[float, Action], None],
        passes: Callable[[str], bool],
    ) -> None:
        self._worker, self._times = worker, times
        self._arena, self._kv, self._after, self._passes = arena, kv, after, passes
        self._waiting: deque[Copy] = deque()
        self._writing: Copy | None = None
        self._done: list[tuple[Copy, int]] = []
        self._held_back = False
        self.preloads: deque[Sequence] = deque()
        self._news = News()

    @property
    def has_news(self) -> bool:
        """Whether a frame is due although no step runs: only a frame ends the pins of copies that are done."""
        return bool(self._news.quiet or self._news.restored or self.preloads or self._done)

    @property
    def moves(self) -> bool:
        """Whether the copier will change something by itself."""
        return self._writing is not None or (bool(self._waiting) and not self._held_back)

    def is_copied(self, page: int) -> bool:
        """Whether a copy of the page is still to be made, so that it must stay as it is."""
        return any(copy.page == page for copy in (self._writing, *self._waiting) if copy is not None)

    # -- commands ------------------------------------------------------------------------------------------------

    def obey(
        self, scheduler: BatchScheduler, command: Reserve | Release | Preload | SealRate, seq: Sequence | None
    ) -> None:
        """Carry out a command that concerns slots; `seq` is the request of a Preload."""
        match command:
            case Reserve(rid=rid, epoch=epoch, first=first, slots=slots):
                there = scheduler.find(rid, epoch)
                if there is not None and len(there.slots) == first:
                    there.slots += slots
            case Release(rid=rid, epoch=epoch):
                self.forget(scheduler, rid)
                if (there := scheduler.find(rid, epoch)) is not None:
                    there.slots, there.num_sealing, there.crcs = [], 0, []
                self._news.quiet.append((rid, epoch))
            case Preload():
                assert seq is not None
                self.preloads.append(seq)
            case SealRate(bytes_s=bytes_s):
                self._held_back = bytes_s == 0
                self._next()

    # -- sealing -------------------------------------------------------------------------------------------------

    def seal_full_pages(self, scheduler: BatchScheduler) -> None:
        """Queue copies of the pages that became whole, as far as there is room."""
        room = self._times.queue - len(self._waiting)
        for seq, index, page in scheduler.take_sealable(room) if room > 0 else []:
            self._waiting.append(Copy((self._worker, seq.rid, seq.epoch), index, page, seq.slots[index]))
        self._next()

    def forget(self, scheduler: BatchScheduler, rid: int) -> None:
        """The request leaves its pages: no copy of them is written after this.

        A preempted one must do so too: pins that wait for a held-back copier would keep its pages from the restores
        that hold the copier back.
        """
        dropped = [copy for copy in self._waiting if copy.writer[1] == rid]
        self._waiting = deque(copy for copy in self._waiting if copy.writer[1] != rid)
        if self._writing is not None and self._writing.writer[1] == rid:
            self._write_rest()  # it is waited for
        for copy in dropped:
            if (seq := scheduler.find(rid, copy.writer[2])) is not None:
                seq.num_sealing = min(seq.num_sealing, copy.index)
        scheduler.unpin(copy.page for copy in dropped)
        self._passes("slots_released")

    def collect(self, scheduler: BatchScheduler) -> News:
        """What happened since the last frame."""
        news, self._news = self._news, News()
        for copy, crc in self._done:
            scheduler.unpin([copy.page])
            _, rid, epoch = copy.writer
            news.sealed.append((rid, epoch, copy.index, crc))
        self._done = []
        return news

    def _next(self) -> None:
        if self._writing is None and self._waiting and not self._held_back:
            copy = self._writing = self._waiting.popleft()
            self._arena.begin(copy.writer, copy.index, copy.slots, self._page(copy))
            if self._passes("copy_begun"):
                self._after(self._times.copy_s, lambda: self._written(copy))

    def _written(self, copy: Copy) -> None:
        if self._writing is copy:
            self._write_rest()

    def _write_rest(self) -> None:
        copy, self._writing = self._writing, None
        assert copy is not None
        page = self._page(copy)
        self._arena.end(copy.writer, copy.index, copy.slots, page)
        if self._passes("copy_done"):
            self._done.append((copy, checksum(page)))
            self._next()

    def _page(self, copy: Copy) -> list[int]:
        return self._kv.read([copy.page], self._kv.page_size)

    # -- restoring -----------------------------------------------------------------------------------------------

    def begin_restore(self, scheduler: BatchScheduler) -> tuple[Sequence, Restore | None] | None:
        """Whose pages are to be loaded now, if any can be: who waits for them first."""
        seq = scheduler.next_restore()
        restore = scheduler.begin_restore(seq) if seq is not None else None
        if seq is not None and restore is not None:
            return seq, restore
        if not self.preloads:
            return None
        seq = self.preloads[0]
        restore = scheduler.begin_restore(seq)
        return None if restore is None and scheduler.restore_may_come(seq) else (seq, restore)

    def load_s(self, restore: Restore | None) -> float:
        """How long that takes."""
        return self._times.load_s * len(restore.pages) if restore is not None else 0.0

    def load(self, scheduler: BatchScheduler, seq: Sequence, restore: Restore | None, seconds: float) -> None:
        """Read the pages until one is bad in every replica, and enter what is good."""
        good = self._read(restore) if restore is not None else 0
        if good < 0:
            return
        pages = scheduler.end_restore(restore, good) if restore is not None else 0
        self._news.restored.append((seq.rid, seq.epoch, pages, good * self._times.page_bytes, seconds))
        if self.preloads and self.preloads[0] is seq:
            self.preloads.popleft()
        self._passes("restore_done")

    def _read(self, restore: Restore) -> int:
        """How many are good; -1 for a death on the way."""
        for position, target in enumerate(restore.pages):
            index = restore.first + position
            pages = [self._arena.read(slot) for slot in restore.seq.slots[index]]
            good = [page for page in pages if self._verified(page, restore.seq.crcs[index])]
            self._kv.fill(target, (good or pages)[0])
            if not good:
                return position
            if not self._passes("page_restored"):
                return -1
        return len(restore.pages)

    def _verified(self, page: list[int], crc: int) -> bool:
        return checksum(page) == crc
