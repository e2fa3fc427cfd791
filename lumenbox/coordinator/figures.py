"""What the box counts of its failures and recoveries, for /metrics. Written on the event loop only."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from math import exp

STALL_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
PHASES = ("detect", "fence", "plan", "restore", "first_token")


class Buckets:
    """A histogram for one thread: an observation costs a bisection, not a lock."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Meter:
    """An amount, and its rate over about the last second: what was added fades, so that silence reads as none."""

    __slots__ = ("_at", "_rate", "total")

    def __init__(self) -> None:
        self.total = 0
        self._rate = 0.0
        self._at = 0.0

    def add(self, amount: int, now: float) -> None:
        """Count it at `now` (monotonic seconds, never falling)."""
        self._rate = self.per_s(now) + amount
        self._at = now
        self.total += amount

    def per_s(self, now: float) -> float:
        """Units a second."""
        return self._rate * exp(self._at - now)


class Figures:
    """Names as in CONTRACT §3; counters by label."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        """Workers lost, by cause."""
        self.recoveries: Counter[tuple[str, str]] = Counter()
        """Interrupted requests by (way, outcome: resumed or ended)."""
        self.tokens: Counter[str] = Counter()
        """Tokens of interrupted requests by where their KV came from: reattach, restore, recompute."""
        self.stall_s = Buckets(STALL_S)
        self.phase_s = {phase: Buckets(STALL_S) for phase in PHASES}
        self.respawn_s = Buckets(STALL_S)
        self.queue_s = Buckets(STALL_S)
