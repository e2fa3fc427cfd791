"""What coordinator and simulated workers say to each other; as `lumenbox.wire.frames`, without the bytes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from lumenbox.core.batching import Report
from lumenbox.core.cost import Shape
from lumenbox.core.pages import PageHash
from lumenbox.core.requests import SamplingParams


@dataclass(slots=True, frozen=True)
class Placed:
    """A request on its way to a worker; the lists are its own. `poison` names where it kills: assign, step, nowhere."""

    rid: int
    epoch: int
    params: SamplingParams
    tokens: list[int]
    num_prompt: int
    priority: int
    poison: str
    page_table: list[int]
    num_computed: int
    slots: list[tuple[int, ...]]
    sealed: int
    crcs: list[int]


@dataclass(slots=True, frozen=True)
class Boot:
    """What an incarnation starts from."""

    adopted: list[Placed]
    hashed: list[tuple[int, PageHash]]


@dataclass(slots=True, frozen=True)
class Assign:
    placed: Placed


@dataclass(slots=True, frozen=True)
class Cancel:
    rid: int
    epoch: int


@dataclass(slots=True, frozen=True)
class Reserve:
    rid: int
    epoch: int
    first: int
    slots: list[tuple[int, ...]]


@dataclass(slots=True, frozen=True)
class Release:
    rid: int
    epoch: int


@dataclass(slots=True, frozen=True)
class Preload:
    placed: Placed


@dataclass(slots=True, frozen=True)
class SealRate:
    bytes_s: float


@dataclass(slots=True, frozen=True)
class Ready:
    num_pages: int
    pool_kept: bool


@dataclass(slots=True)
class News:
    """What a frame tells of KV checkpoints; as in `wire.frames.Step`."""

    sealed: list[tuple[int, int, int, int]] = field(default_factory=list)
    quiet: list[tuple[int, int]] = field(default_factory=list)
    restored: list[tuple[int, int, int, int, float]] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class Step:
    """The commit record of one step."""

    number: int
    started: float
    shape: Shape
    seconds: float
    free_pages: int
    report: Report
    news: News


ToWorker = Assign | Cancel | Reserve | Release | Preload | SealRate
FromWorker = Ready | Step


@dataclass(slots=True)
class Socket:
    """Both directions. What is in `frames` survives the worker's death; what is in `commands` dies with it."""

    commands: deque[ToWorker] = field(default_factory=deque)
    frames: deque[FromWorker] = field(default_factory=deque)
