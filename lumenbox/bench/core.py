"""What the coordinator's decisions cost: placing a checkpoint, planning a recovery, a request's way through the core.

All times are CPU time of the one thread that decides, so that a busy machine does not count; garbage is collected
between the measurements, as the coordinator does it when idle.
"""

from __future__ import annotations

import gc
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

from lumenbox.core import events as e
from lumenbox.core import recovery
from lumenbox.core.checkpoints import Checkpoints
from lumenbox.core.commands import Assign
from lumenbox.core.machine import Core
from lumenbox.core.placement import choose_holders
from lumenbox.core.state import CheckpointConfig, CoreConfig, CoreState, Request, RequestPhase, Worker, WorkerPhase

STRATEGIES = ("restart", "fixed", "lumen", "box")
PAGE_SIZE = 16
PAGE_BYTES = PAGE_SIZE * 160 * 1024
"""Of Qwen3-14B."""
ROUNDS = 20
PLACEMENTS = 2000
REQUESTS = 5000
RUNNING = 16
"""Requests on each worker."""
STEPS = 10
REPEATS = 5


def run(workers: int = 64, interrupted: int = 1000) -> dict[str, Any]:
    """The JSON of `bench core`: see CONTRACT §6.

    `route_us` is the time of a whole plan over its requests, over ROUNDS plans. For `requests_per_s` each request has
    an arrival, an admission, STEPS StepCommitted events and an end, and its pages are reserved, sealed and recycled: as
    if every batch were of one. `batched`: a StepCommitted event is a step of all RUNNING requests of its worker, as it
    is in life. Both are medians of REPEATS runs.
    """
    alone, batched = zip(
        *((_requests_per_s(workers, STEPS), _requests_per_s(workers, STEPS / RUNNING)) for _ in range(REPEATS)),
        strict=True,
    )
    return {
        "schema": 1,
        "requests_per_s": round(median(alone)),
        "place_us": _place_us(workers, interrupted),
        "route_us": {name: _route_us(name, workers, interrupted) for name in STRATEGIES},
        "workers": workers,
        "interrupted": interrupted,
        "batched": {"requests_per_step": RUNNING, "requests_per_s": round(median(batched))},
        "clock": "cpu",
    }


# -- decisions on a snapshot ---------------------------------------------------------------------------------------


def _place_us(workers: int, interrupted: int) -> dict[str, float]:
    state = _loaded("lumen", workers, interrupted, random.Random(1))
    alive = list(state.workers.values())
    with _no_collector():
        return _quantiles([_cpu_us(partial(choose_holders, state, alive, n % workers)) for n in range(PLACEMENTS)])


def _route_us(name: str, workers: int, interrupted: int) -> dict[str, float]:
    times: list[float] = []
    for seed in range(ROUNDS):
        state = _loaded(name, workers, interrupted, random.Random(seed))
        dead = state.workers[0]
        lost = [e.Interrupted(req, state.requests[req].tokens, 0) for req in dead.requests]
        survivors = list(state.workers.values())[1:]
        case = recovery.Case(state, dead, survivors, can_reattach=False, rebirth_s=60.0)
        with _no_collector():
            times.append(_cpu_us(partial(recovery.plan, case, lost)) / interrupted)
    return _quantiles(times)


def _loaded(name: str, workers: int, interrupted: int, chance: random.Random) -> CoreState:
    """A busy box whose worker 0 has `interrupted` requests, all but their last two pages sealed elsewhere."""
    state = CoreState(_config(name, workers), {n: _busy(n, chance) for n in range(workers)})
    accounts = Checkpoints(state, lambda command: None, lambda: list(state.workers.values()))
    for req in range(interrupted):
        tokens = chance.choice((181, 396, 1020, 1189, 2735, 4083))
        request = Request(req, req, tokens, 400, 0, 0.0, RequestPhase.RUNNING, worker=0, limit=tokens + 400)
        state.requests[req] = request
        state.workers[0].requests[req] = True
        accounts.begins(request, now=0.0)
        accounts.sealed(e.PagesSealed(0.0, 0, ((req, 0, max(0, tokens // PAGE_SIZE - 2)),)))
    return state


def _busy(number: int, chance: random.Random) -> Worker:
    requests = {-1 - number * 1000 - n: True for n in range(chance.randrange(20, 60) if number else 0)}
    backlog = chance.choice((0, 0, 500, 3000))
    context = 1000 * len(requests)
    worker = Worker(number, WorkerPhase.READY, pages=20_000, free_pages=16_000, context_tokens=context)
    worker.requests, worker.backlog_tokens = requests, backlog
    return worker


def _config(name: str, workers: int) -> CoreConfig:
    checkpoints = CheckpointConfig(budget_pages=200_000, page_bytes=PAGE_BYTES, bandwidth_bytes_s=25e9)
    return CoreConfig(workers, PAGE_SIZE, 1 << 20, 8192, name, True, checkpoints)


# -- requests through the core -------------------------------------------------------------------------------------


def _requests_per_s(workers: int, steps: float) -> float:
    """`steps` StepCommitted events a request, with RUNNING requests on each worker at any time."""
    core = Core(_config("box", workers))
    for number in range(workers):
        core.handle(e.WorkerReady(0.0, number, 1, 20_000, False))
    running: deque[tuple[int, int]] = deque()
    for req in range(RUNNING * workers):
        running.append((req, _begin(core, req)))
    with _no_collector():
        spent_us = _cpu_us(lambda: _serve(core, running, REQUESTS, steps))
    core.check()
    return REQUESTS / spent_us * 1e6


def _begin(core: Core, req: int) -> int:
    commands = core.handle(e.RequestArrived(0.0, (e.NewRequest(req, 200, 50),)))
    assign = next(command for command in commands if isinstance(command, Assign))
    core.handle(e.Admitted(0.0, assign.worker, req, 0, 0))
    return assign.worker


def _serve(core: Core, running: deque[tuple[int, int]], count: int, steps: float) -> None:
    """`count` requests begin, `count` end; in between every one has its steps, and completes a page in one of them."""
    due = 0.0
    first = running[-1][0] + 1
    for req in range(first, first + count):
        running.append((req, _begin(core, req)))
        old, worker = running.popleft()
        due += steps
        while due >= 1.0:
            due -= 1.0
            crossings = ((old, 13),) if due < 1.0 else ()
            core.handle(e.StepCommitted(0.0, worker, 1, 1, RUNNING, 0, 4000, 0.02, 15_000, crossings))
        core.handle(e.PagesSealed(0.0, worker, ((old, 0, 12),)))
        core.handle(e.RequestFinished(0.0, old, 50))
        core.handle(e.SlotsQuiet(0.0, worker, old, 0))


# -- clocks --------------------------------------------------------------------------------------------------------


def _cpu_us(work: Callable[[], object]) -> float:
    started = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - started) / 1e3


@contextmanager
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _quantiles(values: list[float]) -> dict[str, float]:
    values = sorted(values)
    last = len(values) - 1
    return {"p50": round(values[last // 2], 2), "p99": round(values[-(-last * 99 // 100)], 2)}
