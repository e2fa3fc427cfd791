"""A worker's heartbeat: one page of shared memory that can be read while the worker is stuck, and costs no message.

A seqlock: the writer makes the counter odd, writes, makes it even. A torn read is no news, never a verdict.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from enum import IntEnum

PAGE_BYTES = 4096
_COUNTER = struct.Struct("<Q")
_BODY = struct.Struct("<9Q")


class Phase(IntEnum):
    """What the worker's loop is doing."""

    STARTING = 0
    IDLE = 1
    COMPUTE = 2
    SEND = 3


@dataclass(slots=True, frozen=True)
class Status:
    """One consistent reading. Times are CLOCK_MONOTONIC nanoseconds; `waited_ns` is the loop thread's schedstat time
    spent waiting for a core up to `since_ns`."""

    phase: Phase
    step: int
    since_ns: int
    waited_ns: int
    decodes: int
    prefill_tokens: int
    context_tokens: int
    tid: int
    slow_milli: int
    """By how much chaos stretches the steps, in thousandths; 1000 is not at all."""


class StatusWriter:
    """The worker's side."""

    def __init__(self, page: mmap.mmap, tid: int) -> None:
        self._page = page
        self._tid = tid
        self._counter = 0
        self.slow_factor = 1.0

    def write(
        self, phase: Phase, step: int, since_ns: int, waited_ns: int, shape: tuple[int, int, int] = (0, 0, 0)
    ) -> None:
        """Publish the phase and what the step is made of: (decodes, prefill tokens, context tokens)."""
        _COUNTER.pack_into(self._page, 0, self._counter + 1)
        slow_milli = round(1000 * self.slow_factor)
        _BODY.pack_into(self._page, _COUNTER.size, phase, step, since_ns, waited_ns, *shape, self._tid, slow_milli)
        self._counter += 2
        _COUNTER.pack_into(self._page, 0, self._counter)


def read(page: mmap.mmap) -> Status | None:
    """Read the page once; None if the writer was in the middle of it or has written garbage."""
    (before,) = _COUNTER.unpack_from(page, 0)
    phase, step, since_ns, waited_ns, decodes, prefill, context, tid, slow_milli = _BODY.unpack_from(
        page, _COUNTER.size
    )
    (after,) = _COUNTER.unpack_from(page, 0)
    if before != after or before % 2 or phase > Phase.SEND:
        return None
    return Status(Phase(phase), step, since_ns, waited_ns, decodes, prefill, context, tid, slow_milli)
