"""What the core is told. Every event carries `now` (CLOCK_MONOTONIC seconds); the journal keeps them all."""

from __future__ import annotations

import msgspec


class Event(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all events."""

    now: float


class NewRequest(msgspec.Struct, frozen=True, array_like=True):
    """One sequence of an arriving group."""

    req: int
    prompt_len: int
    max_new: int


class Interrupted(msgspec.Struct, frozen=True, array_like=True):
    """A request that its dead worker had: how many tokens it has, and for how many of them the pool holds KV."""

    req: int
    tokens: int
    computed: int


class RequestArrived(Event, frozen=True, tag=True, array_like=True):
    """A client's call: its sequences share a prompt (siblings of n > 1) or a batch, and are admitted all or none."""

    requests: tuple[NewRequest, ...]
    priority: int = 0


class ClientGone(Event, frozen=True, tag=True, array_like=True):
    """Nobody waits for the request any more (client left, or a stop string ended it)."""

    req: int


class RequestFinished(Event, frozen=True, tag=True, array_like=True):
    """The worker ended the request by itself."""

    req: int
    generated: int


class Admitted(Event, frozen=True, tag=True, array_like=True):
    """The worker's scheduler started the request; `cached` prompt tokens came from its prefix cache."""

    worker: int
    req: int
    epoch: int
    cached: int


class MovedOut(Event, frozen=True, tag=True, array_like=True):
    """The worker let go of a request that was to be moved; it has `tokens` tokens now."""

    worker: int
    req: int
    epoch: int
    tokens: int


class StepCommitted(Event, frozen=True, tag=True, array_like=True):
    """A whole frame arrived. `seconds` is the step's time less what its thread spent waiting for a core."""

    worker: int
    incarnation: int
    step: int
    decodes: int
    prefill_tokens: int
    context_tokens: int
    seconds: float
    free_pages: int
    page_crossings: tuple[tuple[int, int], ...] = ()
    """(request, its whole pages whose KV exists) for each request that completed a page in this step."""


class PagesSealed(Event, frozen=True, tag=True, array_like=True):
    """KV checkpoints became whole: (request, epoch, number of its first pages that are sealed in the arena)."""

    worker: int
    sealed: tuple[tuple[int, int, int], ...]


class SlotsQuiet(Event, frozen=True, tag=True, array_like=True):
    """The writer of a request's arena slots has acknowledged that it writes to none of them any more.

    It follows every end of a request on its worker (finished, dropped) and every DropSlots; Settled stands for all of
    a dead worker's.
    """

    worker: int
    req: int
    epoch: int


class RestoreDone(Event, frozen=True, tag=True, array_like=True):
    """An heir has loaded a request's sealed pages; fewer `pages` than it was given means that a checksum failed."""

    worker: int
    req: int
    epoch: int
    pages: int
    bytes: int
    seconds: float


class WorkerReady(Event, frozen=True, tag=True, array_like=True):
    """An incarnation can compute. `pool_kept` if it continues on its predecessor's KV pool."""

    worker: int
    incarnation: int
    pages: int
    pool_kept: bool


class WorkerExiting(Event, frozen=True, tag=True, array_like=True):
    """The kernel shows that the worker dies or is dead (`evidence`: exiting, pidfd, eof, garbage)."""

    worker: int
    incarnation: int
    evidence: str


class StepOverdue(Event, frozen=True, tag=True, array_like=True):
    """A step outlasts the deadline that its declared shape allows."""

    worker: int
    incarnation: int
    step: int
    late_s: float


class Settled(Event, frozen=True, tag=True, array_like=True):
    """The fence holds and the dead worker's socket is read out.

    `cause` as in a report (exit, signal, hang, slow, device_lost, drain, restart, upgrade). `own_making` if the death
    speaks against the worker or its requests: an exit code, a crash signal, out of memory, a hang; never chaos, planned
    exits, or a SIGKILL from outside. `device_lost` if the KV pool is gone with it.
    """

    worker: int
    incarnation: int
    cause: str
    own_making: bool
    device_lost: bool
    interrupted: tuple[Interrupted, ...]


class SpawnFailed(Event, frozen=True, tag=True, array_like=True):
    """A new incarnation could not be started."""

    worker: int
    incarnation: int
    why: str


class OperatorAsked(Event, frozen=True, tag=True, array_like=True):
    """drain, resume, restart or upgrade of one worker; `shutdown` of the box (worker -1)."""

    verb: str
    worker: int


class TimerFired(Event, frozen=True, tag=True, array_like=True):
    """A timer that the core had set is due."""

    name: str


AnyEvent = (
    RequestArrived
    | ClientGone
    | RequestFinished
    | Admitted
    | MovedOut
    | StepCommitted
    | PagesSealed
    | SlotsQuiet
    | RestoreDone
    | WorkerReady
    | WorkerExiting
    | StepOverdue
    | Settled
    | SpawnFailed
    | OperatorAsked
    | TimerFired
)
