"""The words that coordinator and workers exchange: plain data, one struct a message, a tagged union per direction."""

from __future__ import annotations

from typing import Any

import msgspec

from lumenbox.core.requests import Sampled, SamplingParams
from lumenbox.memory.layout import LoadReport


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """A request on its way to a worker: what it is (parameters and tokens), and for a re-attach where its KV lies."""

    rid: int
    epoch: int
    params: SamplingParams
    tokens: list[int]
    num_prompt: int
    page_table: list[int] = []
    num_computed: int = 0
    priority: int = 0
    poison: bool = False
    slots: list[tuple[int, ...]] = []
    """Arena slots of its first pages, one per replica; the first `sealed` pages are whole."""
    sealed: int = 0
    crcs: list[int] = []
    """Checksums of the sealed pages, if they are to be loaded before it starts."""


# -- coordinator → worker --------------------------------------------------------------------------------------------


class SchedulerLimits(msgspec.Struct, frozen=True):
    """What a worker's BatchScheduler is built from."""

    max_num_seqs: int
    token_budget: int
    max_model_len: int


class Boot(msgspec.Struct, frozen=True, tag="boot", array_like=True):
    """First message of an incarnation. `adopted` and `hashed` describe the pool of the former one, if it is kept."""

    worker: int
    incarnation: int
    model_dir: str
    report: LoadReport
    limits: SchedulerLimits
    device: str
    faults: list[str]
    adopted: list[Placed] = []
    hashed: list[tuple[int, bytes]] = []
    reload_bytes_s: float | None = None
    """Read all weights again before serving, since the device was lost: at this rate, 0 for as fast as it goes."""


class Assign(msgspec.Struct, frozen=True, tag="assign", array_like=True):
    """Take a request and compute it from its tokens."""

    request: Placed


class Cancel(msgspec.Struct, frozen=True, tag="cancel", array_like=True):
    """Forget a request; it is reported back as dropped. `move` asks for it to be handed over, which is the same."""

    rid: int
    epoch: int


class Reserve(msgspec.Struct, frozen=True, tag="reserve", array_like=True):
    """Pages `first`, `first` + 1, … of the request may be written to these arena slots."""

    rid: int
    epoch: int
    first: int
    slots: list[tuple[int, ...]]


class Release(msgspec.Struct, frozen=True, tag="release", array_like=True):
    """Write to none of the request's slots any more, and say so (Step.quiet)."""

    rid: int
    epoch: int


class Preload(msgspec.Struct, frozen=True, tag="preload", array_like=True):
    """Load the sealed pages of a request that still runs elsewhere into the prefix cache (Step.restored follows)."""

    request: Placed


class SealRate(msgspec.Struct, frozen=True, tag="seal_rate", array_like=True):
    """Bytes a second to write to the arena; 0 holds back, negative is unlimited."""

    bytes_s: float


class Disturb(msgspec.Struct, frozen=True, tag="disturb", array_like=True):
    """Chaos: `slow` stretches each step by `factor`, `clear` ends that."""

    kind: str
    factor: float = 1.0


class Stop(msgspec.Struct, frozen=True, tag="stop", array_like=True):
    """Leave after the current step, with exit code 0."""


ToWorker = Boot | Assign | Cancel | Reserve | Release | Preload | SealRate | Disturb | Stop


# -- worker → coordinator --------------------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """The incarnation can compute: it attached to weights and pool (`num_pages` long)."""

    incarnation: int
    num_pages: int
    pool_kept: bool


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """The process ends itself, for this reason (one line)."""

    reason: str


class Step(msgspec.Struct, frozen=True, tag="step", array_like=True):
    """The commit record of one engine step (DESIGN §2.2). The lists are those of batching.Report."""

    incarnation: int
    step: int
    started_ns: int
    seconds: float
    decodes: int
    prefill_tokens: int
    context_tokens: int
    running: int
    waiting: int
    free_pages: int
    cached_pages: int
    preemptions: int
    admitted: list[tuple[int, int, int]]
    tokens: list[tuple[int, int, list[Sampled]]]
    progress: list[tuple[int, int]]
    taken: list[tuple[int, list[int]]]
    hashed: list[tuple[int, bytes]]
    evicted: list[int]
    preempted: list[int]
    finished: list[tuple[int, int, str]]
    dropped: list[tuple[int, int]]
    replaced: list[tuple[int, int, int]]
    sealed: list[tuple[int, int, int, int]] = []
    """(rid, epoch, page index, crc32) of pages that are whole in the arena"""
    quiet: list[tuple[int, int]] = []
    """(rid, epoch) of requests whose slots are written to no more, beside those that finished or were dropped"""
    restored: list[tuple[int, int, int, int, float]] = []
    """(rid, epoch, pages at hand, bytes read, seconds)"""


FromWorker = Ready | Failed | Step


# -- coordinator ↔ fork server ---------------------------------------------------------------------------------------


class Fork(msgspec.Struct, frozen=True, tag="fork", array_like=True):
    """Fork a child that plays `role` (worker, loader); its descriptors ride along with the message, in order:
    its socket, its log, then what the role needs."""

    token: int
    role: str
    spec: dict[str, Any] = {}
    environment: dict[str, str] = {}


class Forked(msgspec.Struct, frozen=True, tag="forked", array_like=True):
    """The child runs as `pid`."""

    token: int
    pid: int


class NotForked(msgspec.Struct, frozen=True, tag="not_forked", array_like=True):
    """There is no child: the kernel had no process, memory or descriptor for it."""

    token: int
    reason: str


class Exited(msgspec.Struct, frozen=True, tag="exited", array_like=True):
    """The child was reaped. `status` as os.waitstatus_to_exitcode: an exit code, or minus a signal number."""

    token: int
    pid: int
    status: int


class Warm(msgspec.Struct, frozen=True, tag="warm", array_like=True):
    """The fork server has imported what its children need."""

    seconds: float


FromForkServer = Warm | Forked | NotForked | Exited


encode = msgspec.msgpack.Encoder().encode
