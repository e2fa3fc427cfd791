"""What the core knows, as plain data: it can be written to a journal segment's head and read back."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from lumenbox.core.cost import StepModel


class WorkerPhase(StrEnum):
    """States of a worker slot (DESIGN §11)."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"
    DRAINED = "drained"
    STOPPED = "stopped"
    DEAD = "dead"
    QUARANTINED = "quarantined"


P = WorkerPhase
TRANSITIONS: dict[WorkerPhase, set[WorkerPhase]] = {
    P.STARTING: {P.READY, P.SUSPECT, P.DEAD},
    P.LOADING: {P.READY, P.SUSPECT, P.DEAD},
    P.READY: {P.SUSPECT, P.DRAINING, P.DEAD},
    P.SUSPECT: {P.DEAD},
    P.DRAINING: {P.DRAINED, P.SUSPECT, P.DEAD},
    P.DRAINED: {P.READY, P.SUSPECT, P.DEAD},
    P.DEAD: {P.LOADING, P.QUARANTINED, P.STOPPED},
    P.QUARANTINED: {P.LOADING},
    P.STOPPED: set(),
}
"""SUSPECT is fenced or about to be: nothing is assigned to it and its death is only a matter of time."""

SERVING = (P.READY,)


class RequestPhase(StrEnum):
    """Where a request is. Exactly one worker owns it from `assigned` on."""

    HELD = "held"
    """Nobody's: no worker can take it now."""
    ASSIGNED = "assigned"
    RUNNING = "running"
    MOVING = "moving"
    """Its owner was asked to let go of it."""
    RETURNING = "returning"
    """It waits for the next incarnation of its worker, which re-attaches to its KV."""


class Request(msgspec.Struct):
    """One sequence of tokens, without the tokens. `tokens` is exact at arrival and at each move."""

    req: int
    group: int
    tokens: int
    max_new: int
    priority: int
    arrived: float
    phase: RequestPhase = RequestPhase.HELD
    worker: int = -1
    epoch: int = 0
    suspicions: int = 0


class Worker(msgspec.Struct):
    """One slot. `requests` are those it owns; `backlog` those of them that it has not admitted, with their tokens."""

    id: int
    phase: WorkerPhase = WorkerPhase.STARTING
    incarnation: int = 1
    pages: int = 0
    free_pages: int = 0
    context_tokens: int = 0
    committed_steps: int = 0
    """Of this incarnation."""
    early_deaths: list[float] = []
    """Deaths of its own making before a first committed step, since the last progress."""
    gray_steps: int = 0
    is_to_drain: bool = False
    """The operator wants it without work; that outlives a death."""
    restarts: int = 0
    requests: dict[int, bool] = {}
    backlog: dict[int, int] = {}
    backlog_tokens: int = 0
    pace: float = 1.0
    """How its steps compare with the box's step model; see health.next_pace."""


class CoreConfig(msgspec.Struct, frozen=True):
    """What the core is told once."""

    workers: int
    page_size: int
    max_queue: int
    max_model_len: int
    recovery: str
    respawn: bool


class CoreState(msgspec.Struct):
    """All of it."""

    config: CoreConfig
    workers: dict[int, Worker]
    requests: dict[int, Request] = {}
    model: StepModel = msgspec.field(default_factory=StepModel)
    """One for all workers, which run the same model on devices of one kind: a slot that had no work yet has no
    opinion of its own, and one that had a bad moment would never get work again."""
    has_served: bool = False
    """Some worker was ready once: from then on a box without workers holds requests instead of refusing them."""
    closing: bool = False
    deaths: int = 0
    birth_s: float = 1.0
    """From a worker's death to the next incarnation's readiness, smoothed."""
    died_at: dict[int, float] = {}
