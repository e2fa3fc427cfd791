"""How the requests of a dead worker go on. One small function a strategy, chosen by name (DESIGN §7)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from lumenbox.core.cost import Shape
from lumenbox.core.events import Interrupted
from lumenbox.core.routing import predicted_wait_s
from lumenbox.core.state import CoreState, Worker


class Case(msgspec.Struct, frozen=True):
    """What a strategy decides on: the state, who died, who can take over, and whether the pool can be attached to."""

    state: CoreState
    dead: Worker
    survivors: list[Worker]
    can_reattach: bool


class Way(msgspec.Struct, frozen=True):
    """`reattach` (heir: the next incarnation), `recompute` (heir: a survivor), `hold` (nobody yet), `end`."""

    way: str
    heir: int = -1


Strategy = Callable[[Case, list[Interrupted]], dict[int, Way]]


def none(case: Case, interrupted: list[Interrupted]) -> dict[int, Way]:
    """Every stream ends with an error."""
    return {lost.req: Way("end") for lost in interrupted}


def restart(case: Case, interrupted: list[Interrupted]) -> dict[int, Way]:
    """Stop-and-Restart: spread over the survivors and computed again from prompt + generated tokens."""
    load = _Load(case)
    return {lost.req: load.recompute(lost) for lost in interrupted}


def box(case: Case, interrupted: list[Interrupted]) -> dict[int, Way]:
    """Per request the sooner of: wait for the next incarnation and re-attach, or recompute on a survivor.

    reattach = remaining birth-to-first-step + step;  recompute(w) = prefill lane free + prefill(rest) + step.
    """
    load = _Load(case)
    ways: dict[int, Way] = {}
    for lost in sorted(interrupted, key=lambda i: (-i.tokens, i.req)):
        if case.can_reattach and lost.computed and load.reattach_s(lost) <= load.recompute_s(lost):
            ways[lost.req] = Way("reattach", case.dead.id)
        else:
            ways[lost.req] = load.recompute(lost)
    return ways


STRATEGIES: dict[str, Strategy] = {"none": none, "restart": restart, "box": box}


class _Load:
    """Predicted waits on the survivors, moved on by each request that is given to one."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._given: dict[int, int] = {w.id: 0 for w in case.survivors}

    def recompute(self, lost: Interrupted) -> Way:
        heir = self._best(lost)
        if heir is None:
            return Way("hold")
        self._given[heir.id] += lost.tokens
        return Way("recompute", heir.id)

    def recompute_s(self, lost: Interrupted) -> float:
        heir = self._best(lost)
        return self._wait_s(heir, lost) if heir else float("inf")

    def reattach_s(self, lost: Interrupted) -> float:
        shape = Shape(len(self._case.dead.requests), max(0, lost.tokens - lost.computed - 1), lost.tokens)
        return self._case.state.birth_s + self._case.state.model.seconds(shape)

    def _best(self, lost: Interrupted) -> Worker | None:
        return min(self._case.survivors, key=lambda w: (self._wait_s(w, lost), w.id), default=None)

    def _wait_s(self, worker: Worker, lost: Interrupted) -> float:
        return predicted_wait_s(self._case.state, worker, self._given[worker.id] + lost.tokens)
