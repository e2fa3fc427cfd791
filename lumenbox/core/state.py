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
LARGEST_SLOWNESS = 4.0
"""A worker's slowness counts up to here: more is a matter of health, not of routing."""


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
    """One sequence of tokens, without the tokens. `tokens` is exact at arrival and at each move.

    `pages` counts its whole pages whose KV its worker has; `limit` is how many tokens it can come to have.
    `evicted`: it has lost its KV checkpoint to another once, and may not take another's in turn.
    `heir` loads its sealed pages ahead of a planned move (-1: none), `follows`: it has, and with the next page that is
    sealed the request goes there.
    """

    req: int
    group: int
    tokens: int
    max_new: int
    priority: int
    arrived: float
    phase: RequestPhase = RequestPhase.HELD
    worker: int = -1
    epoch: int = 0
    suspect: tuple[int, float] | None = None
    """The slot that it may have brought down, and when. If it is there when another dies, it was it."""
    limit: int = 0
    pages: int = 0
    evicted: bool = False
    heir: int = -1
    follows: bool = False

    @property
    def is_moving(self) -> bool:
        """Whether it is about to leave its worker, which lives."""
        return self.heir >= 0 or self.phase == RequestPhase.MOVING


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
    renewal: str = ""
    """The verb (restart, upgrade) that replaces its process as soon as what moves away from it has moved."""
    is_born: bool = False
    """This incarnation was ready once: until then it has touched no request."""
    restarts: int = 0
    requests: dict[int, bool] = {}
    backlog: dict[int, int] = {}
    backlog_tokens: int = 0
    pace: float = 1.0
    """How its steps compare with the box's step model; see health.next_pace. Set by `set_pace`."""
    slowness: float = 1.0
    """The same as decisions count it: nobody is faster than predicted, and how slow the very slow are is no matter."""
    holds: dict[int, bool] = {}
    """Requests whose KV checkpoints are on its budget."""
    held_pages: int = 0
    """Pages on its budget, those included that wait for their writer."""
    unquiet_pages: int = 0
    """Those of them that wait for their writer's acknowledgement."""
    restoring: dict[int, int] = {}
    """Requests whose sealed pages it loads now, with their epochs."""
    is_held_back: bool = False
    """It writes no pages meanwhile."""

    def set_pace(self, pace: float) -> None:
        """What was learned of it."""
        self.pace = pace
        self.slowness = 1.0 if pace <= 1.0 else min(LARGEST_SLOWNESS, pace)


class CheckpointConfig(msgspec.Struct, frozen=True):
    """Where KV checkpoints go and how requests find back to them. An empty name means the strategy's own part.

    `budget_pages` is each holder's (0: no checkpoints). `failure_domains` are workers that fail together (each its own
    if empty). `theta` is in units of the load estimate, `tau` in tokens of the saved prefix. `bandwidth_bytes_s`
    (arena to device) counts until restores have been measured.
    """

    placement: str = ""
    routing: str = ""
    budget_pages: int = 0
    page_bytes: int = 1
    replicas: int = 1
    failure_domains: tuple[tuple[int, ...], ...] = ()
    load_estimate: str = "seconds"
    alpha: float = 1.0
    beta: float = 1.0
    lam: float = 1.0
    routing_rule: str = "mean"
    theta: float = 1.0
    tau: float = 1024.0
    eviction: str = "shortest_prefix"
    bandwidth_bytes_s: float = 4e9

    @classmethod
    def defaults(cls, recovery: str) -> CheckpointConfig:
        """The parts that make up a strategy. `box` counts pages: in seconds, what the holders queue at the moment
        outweighs small pages by far, and one holder gets most of them (measured: README)."""
        placement, routing = PARTS[recovery]
        estimate = "pages" if recovery == "box" else "seconds"
        return cls(placement=placement, routing=routing, load_estimate=estimate)


PARTS = {
    "none": ("none", "least-loaded"),
    "restart": ("none", "least-loaded"),
    "fixed": ("fixed", "holder"),
    "lumen": ("load-aware", "locality-aware"),
    "box": ("load-aware", "cost"),
}
"""(placement, routing) by strategy; `cost` is the cost J of DESIGN §7."""


class CoreConfig(msgspec.Struct, frozen=True):
    """What the core is told once."""

    workers: int
    page_size: int
    max_queue: int
    max_model_len: int
    recovery: str
    respawn: bool
    checkpoints: CheckpointConfig = CheckpointConfig()
    max_num_seqs: int = 1 << 30
    """Requests that a worker runs at a time."""

    @property
    def placement(self) -> str:
        return self.checkpoints.placement or PARTS[self.recovery][0]

    @property
    def routing(self) -> str:
        return self.checkpoints.routing or PARTS[self.recovery][1]


class KvCheckpoint(msgspec.Struct):
    """One request's arena slots: page by page, one per holder; the first `sealed` pages are whole in all of them."""

    holders: tuple[int, ...]
    grown_at: float
    """When it last grew."""
    slots: list[tuple[int, ...]] = []
    sealed: int = 0


class Unquiet(msgspec.Struct, frozen=True):
    """Slots that nobody needs any more, and that their writer may still write to."""

    holders: tuple[int, ...]
    slots: list[tuple[int, ...]]


class Arena(msgspec.Struct):
    """The slots of the box, one stack: those in `free`, and all from `fresh` on, which were never used.

    `unquiet` by (worker, request, epoch) of the writer.
    """

    free: list[int] = []
    fresh: int = 0
    checkpoints: dict[int, KvCheckpoint] = {}
    unquiet: dict[tuple[int, int, int], Unquiet] = {}
    evictions: int = 0
    bandwidth_bytes_s: float = 0.0
    """Measured from restores, smoothed; 0 before the first."""


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
    has_stepped: bool = False
    """Some worker has done a step once: the model, the driver and the code are not what is broken."""
    closing: bool = False
    deaths: int = 0
    birth_s: float = 1.0
    """From a worker's death to the next incarnation's readiness, smoothed."""
    died_at: dict[int, float] = {}
    held: dict[int, bool] = {}
    """Requests in that phase."""
    num_backlog: int = 0
    """Requests in all workers' backlogs."""
    arena: Arena = msgspec.field(default_factory=Arena)

    def num_sealed(self, req: int) -> int:
        """Whole pages of a request that a restore could load."""
        checkpoint = self.arena.checkpoints.get(req)
        return checkpoint.sealed if checkpoint is not None else 0

    @property
    def restore_bytes_s(self) -> float:
        return self.arena.bandwidth_bytes_s or self.config.checkpoints.bandwidth_bytes_s
