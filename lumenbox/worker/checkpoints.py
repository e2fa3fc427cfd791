"""A worker's side of KV checkpoints: which pages to copy, which to load, and what to tell of it in the next frame."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from lumenbox.core.batching import BatchScheduler, Restore, Sequence
from lumenbox.engine.kv_pool import KvPool
from lumenbox.memory.arena import Arena
from lumenbox.wire import frames
from lumenbox.worker.copier import Copier, Copy
from lumenbox.worker.faults import Faults

RESTORE_SLICE_S = 0.02
"""For so long at a time the running requests wait at least while pages of another are loaded."""


@dataclass(slots=True)
class News:
    """For the next frame; see wire.frames.Step."""

    sealed: list[tuple[int, int, int, int]] = field(default_factory=list)
    quiet: list[tuple[int, int]] = field(default_factory=list)
    restored: list[tuple[int, int, int, int, float]] = field(default_factory=list)


@dataclass(slots=True)
class Loading:
    """A restore under way: how many pages are there, and the seconds that took."""

    restore: Restore
    good: int = 0
    seconds: float = 0.0

    def is_of(self, rid: int, epoch: int) -> bool:
        """Whether it is that request's."""
        return (self.restore.seq.rid, self.restore.seq.epoch) == (rid, epoch)


class KvCheckpoints:
    """Seals pages as they fill, loads them when a request arrives with sealed ones."""

    def __init__(self, arena: Arena, pool: KvPool, faults: Faults) -> None:
        self._arena, self._pool, self._faults = arena, pool, faults
        self._copier: Copier | None = None
        """Started with the first slot: a box without checkpoints has no thread for them."""
        self._preloads: deque[Sequence] = deque()
        self._loading: Loading | None = None
        self._news = News()

    @property
    def has_news(self) -> bool:
        """Whether a frame is due although no step runs."""
        done = self._copier is not None and self._copier.has_done  # its pages are pinned until a frame tells of them
        return bool(self._news.quiet or self._news.restored or self._preloads or self._loading or done)

    def obey(
        self,
        scheduler: BatchScheduler,
        command: frames.Reserve | frames.Release | frames.Preload | frames.SealRate,
    ) -> None:
        """Carry out a command that concerns slots."""
        match command:
            case frames.Reserve():
                self._reserve(scheduler, command)
            case frames.Release(rid=rid, epoch=epoch):
                self._release(scheduler, rid, epoch)
            case frames.Preload(request=placed):
                self._preloads.append(sequence(placed))
            case frames.SealRate(bytes_s=bytes_s):
                self._started_copier().set_rate(bytes_s)

    def seal_full_pages(self, scheduler: BatchScheduler) -> None:
        """Queue copies of the pages that became whole; under pressure they wait for a later step."""
        room = self._copier.room if self._copier else 1
        found = scheduler.take_sealable(room) if room > 0 else []
        for seq, index, page in found:
            self._started_copier().submit(Copy(seq.rid, seq.epoch, index, page, seq.slots[index]))

    def forget(self, scheduler: BatchScheduler, rid: int) -> None:
        """The request leaves its pages: no copy of it will be written after this."""
        if self._copier is None:
            return
        dropped = self._copier.forget(rid)
        scheduler.unpin(copy.page for copy in dropped)
        if dropped and (seq := scheduler.find(rid, dropped[0].epoch)) is not None:
            seq.num_sealing = min(copy.index for copy in dropped)  # preempted: it seals them when it is back
        self._faults.at("slots_released")

    def cancel(self, scheduler: BatchScheduler, rid: int, epoch: int) -> None:
        """Nothing is to be loaded for it any more. What was loaded already is prefix cache like any other."""
        self._preloads = deque(s for s in self._preloads if (s.rid, s.epoch) != (rid, epoch))
        if self._loading is not None and self._loading.is_of(rid, epoch):
            scheduler.end_restore(self._loading.restore, self._loading.good)
            self._loading = None

    def collect(self, scheduler: BatchScheduler) -> News:
        """What happened since the last frame."""
        news, self._news = self._news, News()
        if self._copier is not None:
            for done in self._copier.collect():
                scheduler.unpin([done.copy.page])
                news.sealed.append((done.copy.rid, done.copy.epoch, done.copy.index, done.crc))
        return news

    def restore_some(self, scheduler: BatchScheduler, step_s: float) -> None:
        """Load pages of requests that wait for them, for about as long as the last step of the running ones took.

        So neither waits more than twice as long as without the other, unless steps are shorter than RESTORE_SLICE_S.
        """
        until = time.monotonic() + max(RESTORE_SLICE_S, step_s)
        while self._loading is not None or self._begin_restore(scheduler):
            self._load(scheduler, until)
            if time.monotonic() >= until:
                return

    def _begin_restore(self, scheduler: BatchScheduler) -> bool:
        """Begin to load the pages of one request; whether there was one for which there is room.

        Who waits for them goes first, the shortest of those; nobody waits for what is sent ahead of a move.
        """
        seq = scheduler.next_restore()
        restore = scheduler.begin_restore(seq) if seq is not None else None
        if restore is None and self._preloads:
            restore = scheduler.begin_restore(self._preloads[0])
            if restore is not None:
                self._preloads.popleft()
            elif not scheduler.restore_may_come(self._preloads[0]):
                self._tell_restored(self._preloads.popleft())
        if restore is None:
            return False
        self._faults.at("restore_begun")
        self._loading = Loading(restore)
        return True

    def _load(self, scheduler: BatchScheduler, until: float) -> None:
        """Read pages until it is late, all are there, or one's checksum fails in every replica."""
        loading = self._loading
        assert loading is not None
        started = time.monotonic()
        restore, is_sound = loading.restore, True
        while is_sound and loading.good < len(restore.pages):
            is_sound = self._read(restore, loading.good)
            if is_sound:
                loading.good += 1
                self._faults.at("page_restored")
            if time.monotonic() >= until:
                break
        loading.seconds += time.monotonic() - started
        if not is_sound or loading.good == len(restore.pages):
            self._end_loading(scheduler)
            self._faults.at("restore_done")

    def _end_loading(self, scheduler: BatchScheduler) -> None:
        """Keep what is there, and tell of it."""
        loading, self._loading = self._loading, None
        assert loading is not None
        pages = scheduler.end_restore(loading.restore, loading.good)
        self._tell_restored(loading.restore.seq, pages, loading.good, loading.seconds)

    def _tell_restored(self, seq: Sequence, pages: int = 0, loaded: int = 0, seconds: float = 0.0) -> None:
        self._news.restored.append((seq.rid, seq.epoch, pages, loaded * self._arena.page_bytes, seconds))

    def _read(self, restore: Restore, position: int) -> bool:
        seq, index = restore.seq, restore.first + position
        target = self._pool.page_bytes(restore.pages[position])
        return any(self._arena.read(slot, target) == seq.crcs[index] for slot in seq.slots[index])

    def _reserve(self, scheduler: BatchScheduler, command: frames.Reserve) -> None:
        seq = scheduler.find(command.rid, command.epoch)
        if seq is not None and len(seq.slots) == command.first:
            seq.slots += command.slots

    def _release(self, scheduler: BatchScheduler, rid: int, epoch: int) -> None:
        self.forget(scheduler, rid)
        if self._loading is not None and self._loading.is_of(rid, epoch):
            self._end_loading(scheduler)  # before its checksums go, and the slots may be another's
        if (seq := scheduler.find(rid, epoch)) is not None:
            if seq.crcs:
                self._tell_restored(seq)
            seq.slots, seq.num_sealing, seq.crcs = [], 0, []
        self._news.quiet.append((rid, epoch))

    def _started_copier(self) -> Copier:
        if self._copier is None:
            self._copier = Copier(self._arena, self._pool.page_bytes, self._faults)
        return self._copier


def sequence(placed: frames.Placed) -> Sequence:
    """A request as it arrived, for the scheduler."""
    return Sequence(
        rid=placed.rid,
        epoch=placed.epoch,
        params=placed.params,
        tokens=placed.tokens,
        num_prompt=placed.num_prompt,
        page_table=list(placed.page_table),
        num_computed=placed.num_computed,
        priority=placed.priority,
        slots=list(placed.slots),
        num_sealing=placed.sealed,
        crcs=list(placed.crcs),
    )
