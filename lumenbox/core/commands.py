"""What the core answers with. The shell performs them in order; none of them can fail for the core."""

from __future__ import annotations

import msgspec


class Command(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all commands."""


class Refuse(Command, frozen=True, tag=True, array_like=True):
    """The arriving requests are not taken: `code` queue_full (429) or loading, draining, no_worker (503)."""

    reqs: tuple[int, ...]
    code: str
    retry_after_s: int


class Assign(Command, frozen=True, tag=True, array_like=True):
    """The worker owns the request from now on, under `epoch`. `way`: new, recompute, reattach, restore.

    `slots` are the arena slots reserved for it so far, page by page, one per replica; the first `sealed` pages are
    whole: `restore` loads them, and whatever the way, the worker goes on sealing behind them.
    """

    worker: int
    req: int
    epoch: int
    way: str
    slots: tuple[tuple[int, ...], ...] = ()
    sealed: int = 0


class ReserveSlots(Command, frozen=True, tag=True, array_like=True):
    """The worker may write pages `first`, `first` + 1, … of its request to these arena slots (one per replica)."""

    worker: int
    req: int
    epoch: int
    first: int
    slots: tuple[tuple[int, ...], ...]


class DropSlots(Command, frozen=True, tag=True, array_like=True):
    """The worker is to forget its request's slots; SlotsQuiet follows, even if it knows nothing of the request.

    They were evicted from the budgets of `holders`, or (none given) their request ended while its worker was not born
    yet: then this is told when it is ready.
    """

    worker: int
    req: int
    epoch: int
    holders: tuple[int, ...] = ()
    pages: int = 0


class PreRestore(Command, frozen=True, tag=True, array_like=True):
    """A worker loads the sealed pages of a request that still runs elsewhere, so that its move stops it but briefly.

    RestoreDone under this epoch follows, with 0 pages if it could not. Then comes an Assign under a later epoch, whose
    first pages are these, or a Cancel under this one.
    """

    worker: int
    req: int
    epoch: int
    slots: tuple[tuple[int, ...], ...]


class SetSealRate(Command, frozen=True, tag=True, array_like=True):
    """Bytes a second that the worker may write to the arena; 0 holds checkpoints back, negative is unlimited.

    Every incarnation begins unlimited.
    """

    worker: int
    bytes_s: float


class Cancel(Command, frozen=True, tag=True, array_like=True):
    """The worker is to forget the request."""

    worker: int
    req: int
    epoch: int


class MoveOut(Command, frozen=True, tag=True, array_like=True):
    """The worker is to let go of the request; MovedOut follows, unless it ends or the worker dies first."""

    worker: int
    req: int
    epoch: int


class EndStream(Command, frozen=True, tag=True, array_like=True):
    """The request cannot go on: `code` worker_lost (503) or worker_died (500, a poison request)."""

    req: int
    code: str


class Fence(Command, frozen=True, tag=True, array_like=True):
    """Make sure that the incarnation runs no more user code, read its socket out, then tell Settled."""

    worker: int
    incarnation: int
    cause: str


class Spawn(Command, frozen=True, tag=True, array_like=True):
    """Start the next incarnation; it continues on the KV pool if `keep_pool`. WorkerReady or SpawnFailed follows."""

    worker: int
    incarnation: int
    keep_pool: bool


class SetTimer(Command, frozen=True, tag=True, array_like=True):
    """TimerFired(name) at `at`; a timer set again moves."""

    name: str
    at: float


class Changed(Command, frozen=True, tag=True, array_like=True):
    """A worker's state changed; for events, the TUI and metrics."""

    worker: int
    state: str
    why: str


class Planned(Command, frozen=True, tag=True, array_like=True):
    """A recovery was decided: the way of each interrupted request, (req, way, heir or -1).

    The way `migrate` interrupts nothing yet: the request decodes on until its pages are there. `cause` is then a verb
    of the operator or `rebalance`; if the verb replaces the process, the plan for what is left follows.
    """

    worker: int
    incarnation: int
    cause: str
    strategy: str
    ways: tuple[tuple[int, str, int], ...]


class Stays(Command, frozen=True, tag=True, array_like=True):
    """A request that was to migrate decodes on where it is: its heir is gone, or could not take its pages."""

    req: int


class Exit(Command, frozen=True, tag=True, array_like=True):
    """The box ends with this exit code."""

    code: int
    why: str


AnyCommand = (
    Refuse
    | ReserveSlots
    | DropSlots
    | PreRestore
    | SetSealRate
    | Assign
    | Cancel
    | MoveOut
    | EndStream
    | Fence
    | Spawn
    | SetTimer
    | Changed
    | Planned
    | Stays
    | Exit
)
