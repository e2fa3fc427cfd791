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


@dataclass(slots=True)
class News:
    """For the next frame; see wire.frames.Step."""

    sealed: list[tuple[int, int, int, int]] = field(default_factory=list)
    quiet: list[tuple[int, int]] = field(default_factory=list)
    restored: list[tuple[int, int, int, int, float]] = field(default_factory=list)


class KvCheckpoints:
    """Seals pages as they fill, loads them when a request arrives with sealed ones."""

    def __init__(self, arena: Arena, pool: KvPool, faults: Faults) -> None:
        self._arena, self._pool, self._faults = arena, pool, faults
        self._copier: Copier | None = None
        """Started with the first slot: a box without checkpoints has no thread for them."""
        self._preloads: deque[Sequence] = deque()
        self._news = News()

    @property
    def has_news(self) -> bool:
        """Whether a frame is due although no step runs."""
        done = self._copier is not None and self._copier.has_done  # its pages are pinned until a frame tells of them
        return bool(self._news.quiet or self._news.restored or self._preloads or done)

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

    def cancel_preload(self, rid: int, epoch: int) -> None:
        """The request does not come after all. What was loaded already is prefix cache like any other."""
        self._preloads = deque(s for s in self._preloads if (s.rid, s.epoch) != (rid, epoch))

    def collect(self, scheduler: BatchScheduler) -> News:
        """What happened since the last frame."""
        news, self._news = self._news, News()
        if self._copier is not None:
            for done in self._copier.collect():
                scheduler.unpin([done.copy.page])
                news.sealed.append((done.copy.rid, done.copy.epoch, done.copy.index, done.crc))
        return news

    def restore_some(self, scheduler: BatchScheduler) -> None:
        """Load the pages of requests that wait for them, for about as long as the running ones can be kept waiting."""
        until = time.monotonic() + RESTORE_SLICE_S
        while self._restore_one(scheduler) and time.monotonic() < until:
            pass

    def _restore_one(self, scheduler: BatchScheduler) -> bool:
        """Load the pages of one request; whether there was one that could be loaded.

        Who waits for them goes first, the shortest of those; nobody waits for what is sent ahead of a move.
        """
        seq = scheduler.next_restore()
        restore = scheduler.begin_restore(seq) if seq is not None else None
        is_ahead = restore is None and bool(self._preloads)
        if is_ahead:
            seq = self._preloads[0]
            restore = scheduler.begin_restore(seq)
        if seq is None or (restore is None and (not is_ahead or scheduler.restore_may_come(seq))):
            return False
        started = time.monotonic()
        self._faults.at("restore_begun")
        good = self._load(restore) if restore else 0
        pages = scheduler.end_restore(restore, good) if restore else 0
        seconds = time.monotonic() - started
        self._news.restored.append((seq.rid, seq.epoch, pages, good * self._arena.page_bytes, seconds))
        self._faults.at("restore_done")
        if is_ahead:
            self._preloads.popleft()
        return True

    def _load(self, restore: Restore) -> int:
        """Read pages until one's checksum fails in every replica; returns how many are good."""
        for position, page in enumerate(restore.pages):
            index = restore.first + position
            target = self._pool.page_bytes(page)
            if not any(self._arena.read(slot, target) == restore.seq.crcs[index] for slot in restore.seq.slots[index]):
                return position
            self._faults.at("page_restored")
        return len(restore.pages)

    def _reserve(self, scheduler: BatchScheduler, command: frames.Reserve) -> None:
        seq = scheduler.find(command.rid, command.epoch)
        if seq is not None and len(seq.slots) == command.first:
            seq.slots += command.slots

    def _release(self, scheduler: BatchScheduler, rid: int, epoch: int) -> None:
        self.forget(scheduler, rid)
        if (seq := scheduler.find(rid, epoch)) is not None:
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
