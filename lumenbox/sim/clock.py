"""Virtual time: a heap of things to do. Nothing else in the simulation knows what time it is."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

Action = Callable[[], None]


class Clock:
    """`now` moves from one event to the next; what is due together happens in the order in which it was planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Action]] = []
        self._planned = 0

    def at(self, when: float, action: Action) -> None:
        """Do it at `when`, or now if that has passed."""
        self._planned += 1
        heappush(self._heap, (max(when, self.now), self._planned, action))

    def after(self, delay_s: float, action: Action) -> None:
        """Do it `delay_s` from now."""
        self.at(self.now + delay_s, action)

    def step(self) -> None:
        """Do what is due next."""
        self.now, _, action = heappop(self._heap)
        action()
