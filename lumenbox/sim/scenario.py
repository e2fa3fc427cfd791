"""What a seed stands for: the box, the load and the faults, all drawn before the first event."""

from __future__ import annotations

import random
from dataclasses import dataclass

from lumenbox.core.requests import SamplingParams
from lumenbox.core.state import CheckpointConfig, CoreConfig
from lumenbox.sim.kv import END, VOCABULARY

SPAN_S = 1.5
"""Load and faults fall into this time; then the box must become whole."""
FIRST_CALL_S = 0.25
POINTS = ("page_taken", "step_computed", "frame_half_written", "frame_written", "page_reused")
"""Where a worker can be made to die between two instructions; as in lumenbox.worker.faults."""
COPY_POINTS = ("copy_begun", "copy_done", "restore_begun", "page_restored", "restore_done", "slots_released")
PAGE_BYTES = 1000
BIRTH_POINTS = ("reattach_begun", "reattach_done", "ready_sent")


@dataclass(slots=True, frozen=True)
class Call:
    """One client: `n` choices of each prompt. It leaves at `leaves_at` if it has not got all by then."""

    at: float
    prompts: list[list[int]]
    n: int
    params: SamplingParams
    stop: tuple[str, ...]
    include_stop: bool
    priority: int
    leaves_at: float
    poison: str


@dataclass(slots=True, frozen=True)
class Fault:
    """Something that goes wrong, or an operator's wish, at `at`. `kind` names a function of `faults`.

    `worker` -1 is whoever then has the most to do.
    """

    at: float
    kind: str
    worker: int
    amount: float
    point: str


@dataclass(slots=True, frozen=True)
class CopyTimes:
    """A copy to the arena takes `copy_s` a page, a load `load_s`; `queue` pages may wait for their copy."""

    copy_s: float
    load_s: float
    queue: int
    page_bytes: int = PAGE_BYTES


@dataclass(slots=True, frozen=True)
class Scenario:
    """A whole history's causes. `late` stretches the time in which deaths are noticed.

    A step takes `step_s`, a part of it more a decode, and `prefill_s` more a prefill token: where that is dear and
    births are quick, re-attaching pays.
    """

    seed: int
    core: CoreConfig
    num_pages: int
    max_num_seqs: int
    token_budget: int
    step_s: float
    prefill_s: float
    birth_s: float
    late: float
    calls: list[Call]
    faults: list[Fault]
    copying: CopyTimes = CopyTimes(0.001, 0.0002, 64)


FAULTS = {
    "kill": 5.0, "doom": 5.0, "crash": 2.0, "hang": 1.0, "stop": 2.0, "slow": 2.0, "lose": 1.5,
    "several": 2.0, "everyone": 1.0, "fork_server": 1.0, "reborn": 3.0, "stillborn": 2.0, "unspawnable": 0.5,
    "pause": 2.0, "deserted": 2.0, "drain": 3.0, "resume": 2.0, "restart": 2.0, "upgrade": 1.0, "shutdown": 0.1,
    "corrupt": 3.0,
}  # fmt: skip


def scenario(seed: int) -> Scenario:
    """Draw everything from the seed."""
    rng = random.Random(seed)
    workers = rng.choice((1, 1, 2, 2, 3, 4, 5, 6))
    page_size = rng.choice((2, 3, 4, 8, 16))
    context = rng.choice((rng.randint(16, 80), rng.randint(40, 160)))
    is_long = rng.random() < 0.35
    num_pages = max(2, -(-context // page_size) + rng.choice((0, 0, 1, 3, 8, 24)) * (4 if is_long else 1))
    max_num_seqs = rng.randint(1, 8)
    return Scenario(
        seed=seed,
        core=CoreConfig(
            workers=workers,
            page_size=page_size,
            max_queue=rng.choice((3, 10, 100, 100)),
            max_model_len=context,
            recovery=rng.choices(("none", "restart", "fixed", "lumen", "box"), (1, 2, 2, 4, 6))[0],
            respawn=rng.random() < 0.92,
            checkpoints=_checkpoints(rng, workers),
        ),
        num_pages=num_pages,
        max_num_seqs=max_num_seqs,
        token_budget=max_num_seqs + rng.choice((1, 4, 16, 64)),
        step_s=rng.choice((0.004, 0.01, 0.02)),
        prefill_s=rng.choice((0.0002, 0.002, 0.01)),
        birth_s=rng.choice((0.02, 0.02, 0.2)),
        late=rng.choice((0.2, 1.0, 5.0)),
        calls=_calls(rng, context, is_long),
        faults=_faults(rng, workers, 0.6 if is_long else 0.1),
        copying=CopyTimes(rng.choice((0.0005, 0.003, 0.02)), rng.choice((0.0001, 0.001)), rng.choice((1, 4, 64))),
    )


def _checkpoints(rng: random.Random, workers: int) -> CheckpointConfig:
    """In two of three boxes; their budgets are small more often than not."""
    if rng.random() < 0.33:
        return CheckpointConfig()
    named = rng.random() < 0.4
    return CheckpointConfig(
        placement=rng.choice(("", "none", "fixed", "load-aware", "load-aware")) if named else "",
        routing=rng.choice(("", "holder", "locality-aware", "least-loaded", "cost")) if named else "",
        budget_pages=rng.choice((1, 2, 4, 8, 16, 50, 400, 400)),
        page_bytes=PAGE_BYTES,
        replicas=rng.choice((1, 1, 2)),
        failure_domains=_domains(rng, workers),
        load_estimate=rng.choice(("pages", "seconds")),
        alpha=rng.choice((0.0, 1.0)),
        beta=rng.choice((0.0, 1.0, 10.0)),
        lam=rng.choice((0.0, 1.0)),
        routing_rule=rng.choice(("threshold", "mean")),
        theta=rng.choice((0.0, 0.1, 5.0)),
        tau=rng.choice((0.0, 8.0, 1024.0)),
        eviction=rng.choice(("shortest_prefix", "lru", "priority")),
        bandwidth_bytes_s=rng.choice((1e5, 1e6, 1e8)),
    )


def _domains(rng: random.Random, workers: int) -> tuple[tuple[int, ...], ...]:
    """Each its own, or pairs and halves that fail together."""
    size = rng.choice((0, 0, 2, 3))
    return tuple(tuple(range(at, min(workers, at + size))) for at in range(0, workers, size)) if size else ()


def _calls(rng: random.Random, context: int, is_long: bool) -> list[Call]:
    prefixes = [[rng.randrange(1, len(VOCABULARY)) for _ in range(context)] for _ in range(2)]
    return [_call(rng, context, prefixes, is_long) for _ in range(rng.randint(3, 8 if is_long else 14))]


def _call(rng: random.Random, context: int, prefixes: list[list[int]], is_long: bool) -> Call:
    """Long ones decode until they are interrupted, with much KV behind them."""
    at = rng.uniform(FIRST_CALL_S, 0.7 if is_long else SPAN_S)
    max_tokens = rng.choice((30, 60, 100) if is_long else (1, 3, 10, 20, 40, 100))
    ends = (END,) if rng.random() < 0.8 else (END, rng.randrange(1, len(VOCABULARY)))
    params = SamplingParams(
        max_tokens=max_tokens,
        end_ids=() if rng.random() < (0.9 if is_long else 0.6) else ends,
        min_tokens=rng.choice((0, 0, 0, 2, 12)),
        seed=rng.getrandbits(40),
    )
    stop = tuple(
        rng.choice(("bca", "ab", "éa", "cc", "f\n", " the b", "aaaa", "abcabc")) for _ in range(rng.randint(1, 2))
    )
    return Call(
        at=at,
        prompts=[_prompt(rng, context, prefixes) for _ in range(rng.choice((1, 1, 1, 2)))],
        n=rng.choice((1, 1, 1, 2, 3)),
        params=params,
        stop=stop if rng.random() < 0.3 else (),
        include_stop=rng.random() < 0.3,
        priority=rng.choice((0, 0, 0, -1, 1)),
        leaves_at=at + rng.uniform(0.0, 1.0) if rng.random() < 0.15 else float("inf"),
        poison=rng.choice(("assign", "step")) if rng.random() < 0.03 else "",
    )


def _prompt(rng: random.Random, context: int, prefixes: list[list[int]]) -> list[int]:
    length = min(context - 1, rng.choice((1, 2, 7, 16, 33, context - 1)))
    shared = rng.randint(0, length)
    tail = [rng.randrange(1, len(VOCABULARY)) for _ in range(length - shared)]
    return rng.choice(prefixes)[:shared] + tail


def _faults(rng: random.Random, workers: int, first: float) -> list[Fault]:
    count = rng.choice((0, 1, 2, 4, 6, 9, 14))
    kinds = rng.choices(list(FAULTS), list(FAULTS.values()), k=count)
    return [_fault(rng, kind, workers, first) for kind in kinds]


def _fault(rng: random.Random, kind: str, workers: int, first: float) -> Fault:
    points = BIRTH_POINTS if kind == "reborn" else rng.choice((POINTS, COPY_POINTS))
    worker = max(-1, rng.randrange(-workers, workers))
    return Fault(rng.uniform(first, SPAN_S), kind, worker, rng.random(), rng.choice(points))
