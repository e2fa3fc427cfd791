"""LUMENBOX_FAULT inside a worker: deaths at named points, so that tests reach every instruction that matters."""

from __future__ import annotations

import os
import signal
from collections import Counter

POINTS = (
    "page_taken",
    "page_reused",
    "step_computed",
    "frame_half_written",
    "frame_written",
    "prefill_chunk_done",
    "reattach_begun",
    "reattach_done",
    "copy_begun",
    "copy_done",
    "restore_begun",
    "page_restored",
    "restore_done",
    "slots_released",
)


class Faults:
    """The planned faults of one incarnation: `die_at:POINT[:K[:INCARNATION]]`, `slow_step:N:FACTOR`,
    `exit0_at_start:N`. A death happens in one incarnation only: the first in which its point can be passed.
    """

    def __init__(self, specs: list[str], worker: int, incarnation: int) -> None:
        self._deaths: dict[str, int] = {}
        self._passed: Counter[str] = Counter()
        self.slow_factor = 1.0
        self.exits_at_start = False
        for spec in specs:
            kind, *rest = spec.split(":")
            if kind == "die_at" and incarnation == _incarnation_of(rest):
                self._deaths[rest[0]] = int(rest[1]) if len(rest) > 1 else 1
            elif kind == "slow_step" and int(rest[0]) == worker:
                self.slow_factor = float(rest[1])
            elif kind == "exit0_at_start" and int(rest[0]) == worker:
                self.exits_at_start = True

    def at(self, point: str) -> None:
        """Pass a point; the K-th passage of a planned one is the process's last."""
        if self._deaths and self.due(point):
            os.kill(os.getpid(), signal.SIGKILL)

    def due(self, point: str) -> bool:
        """Count a passage; whether it is the planned one."""
        self._passed[point] += 1
        return self._passed[point] == self._deaths.get(point)

    @property
    def armed(self) -> bool:
        return bool(self._deaths)


def _incarnation_of(rest: list[str]) -> int:
    if len(rest) > 2:
        return int(rest[2])
    return 2 if rest[0].startswith("reattach") else 1
