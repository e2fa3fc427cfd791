"""Copies filled pages to the arena, off the decode path: a thread that holds the GIL only between copies.

Pages are pinned by the scheduler until their copy is done. When a request leaves, `forget` returns only once no copy of
its pages can still be written, so the frame that tells of its end is also the acknowledgement that its slots are quiet.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lumenbox.memory.arena import Arena
from lumenbox.worker.faults import Faults

QUEUE_PAGES = 64
"""Pages that may wait for their copy: beyond that the worker decodes on, and the rest is sealed later."""


@dataclass(slots=True, frozen=True)
class Copy:
    """One page of one request, to every slot that keeps it."""

    rid: int
    epoch: int
    index: int
    page: int
    slots: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class Sealed:
    """A copy that is whole."""

    copy: Copy
    crc: int


class Copier:
    """Owner of the thread. `page_of(page)` gives the bytes of a pool page."""

    def __init__(self, arena: Arena, page_of: Callable[[int], memoryview], faults: Faults) -> None:
        self._arena, self._page_of, self._faults = arena, page_of, faults
        self._change = threading.Condition()
        self._waiting: deque[Copy] = deque()
        self._writing: Copy | None = None
        self._done: list[Sealed] = []
        self._rate = -1.0
        threading.Thread(target=self._run, name="copier", daemon=True).start()

    @property
    def room(self) -> int:
        """How many more copies may be queued now."""
        return QUEUE_PAGES - len(self._waiting)

    @property
    def has_done(self) -> bool:
        """Whether there is something to collect."""
        return bool(self._done)

    def submit(self, copy: Copy) -> None:
        """Queue a copy; its page must stay as it is until the copy is collected or forgotten."""
        with self._change:
            self._waiting.append(copy)
            self._change.notify_all()

    def collect(self) -> list[Sealed]:
        """Copies that became whole since the last call."""
        with self._change:
            done, self._done = self._done, []
            return done

    def forget(self, rid: int) -> list[Copy]:
        """Cancel the copies of a request; returns those that were not made. Waits for one that is being written."""
        with self._change:
            dropped = [copy for copy in self._waiting if copy.rid == rid]
            self._waiting = deque(copy for copy in self._waiting if copy.rid != rid)
            self._change.wait_for(lambda: self._writing is None or self._writing.rid != rid)
            return dropped

    def set_rate(self, bytes_s: float) -> None:
        """Bytes a second to write at most; 0 holds back, negative is unlimited."""
        with self._change:
            self._rate = bytes_s
            self._change.notify_all()

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: bool(self._waiting) and self._rate != 0)
                copy = self._writing = self._waiting.popleft()
                rate = self._rate
            started = time.monotonic()
            self._faults.at("copy_begun")
            page = self._page_of(copy.page)
            crcs = [self._arena.write(slot, page) for slot in copy.slots]
            self._faults.at("copy_done")
            with self._change:
                self._writing = None
                self._done.append(Sealed(copy, crcs[0]))
                self._change.notify_all()
            if rate > 0:
                pause = len(page) * len(copy.slots) / rate - (time.monotonic() - started)
                time.sleep(max(0.0, pause))  # the rate is the purpose, nobody waits for this
