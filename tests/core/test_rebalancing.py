"""Which requests move to a worker that is back. The step model is that of test_judgement: 10 ms + 1 ms a decode + 1 ms
a prefill token + 1 ms per 1,024 tokens of context."""

from __future__ import annotations

import pytest
from test_judgement import model

from lumenbox.core import commands as c
from lumenbox.core import events as e
from lumenbox.core.machine import Core
from lumenbox.core.rebalancing import moves
from lumenbox.core.state import (
    CheckpointConfig,
    CoreConfig,
    CoreState,
    KvCheckpoint,
    Request,
    RequestPhase,
    Worker,
    WorkerPhase,
)


def box(requests: int, left: int = 1024, recovery: str = "box", sealed: int = 64, free: int = 1000) -> CoreState:
    """w0 decodes `requests` of 1,024 tokens each, all sealed on w1, which is on its way."""
    config = CoreConfig(2, 16, 100, 8192, recovery, True, CheckpointConfig(budget_pages=1000))
    busy, coming = Worker(0, WorkerPhase.READY, free_pages=100), Worker(1, WorkerPhase.LOADING, 2, free_pages=free)
    state = CoreState(config, {0: busy, 1: coming}, model=model(), has_served=True)
    for req in range(requests):
        state.requests[req] = Request(req, req, 1024, left, 0, 0.0, RequestPhase.RUNNING, worker=0, limit=1024 + left)
        busy.requests[req] = True
        if sealed:
            slots = [(slot,) for slot in range(64 * req, 64 * (req + 1))]
            state.arena.checkpoints[req] = KvCheckpoint((1,), 0.0, slots, sealed)
            coming.holds[req] = True
            coming.held_pages += 64
            state.arena.fresh += 64
    return state


def moved(state: CoreState) -> list[int]:
    return [request.req for request in moves(state, state.workers[1], [state.workers[0]])]


def test_four_become_two_and_two() -> None:
    """The first saves 256 steps x (3 x 2 + 18 - 12 ms), the second 256 x (2 x 2 - 2 + 16 - 14); a third would lose."""
    assert moved(box(4)) == [0, 1]


def test_what_ends_soon_stays() -> None:
    """10 steps: the first saves 120 ms and costs 2 x (18 + 12 + 16); the second would save 40. 7 steps save 84."""
    assert moved(box(4, left=10)) == [0]
    assert moved(box(4, left=7)) == []


@pytest.mark.parametrize("state", [box(1), box(4, sealed=0), box(4, free=70), box(0)], ids=str)
def test_nothing_moves(state: CoreState) -> None:
    """Alone it is as fast elsewhere; without pages, or without room for them, a move costs too much."""
    assert moved(state) == []


def test_nobody_moves_by_a_model_that_knows_nothing() -> None:
    state = box(4)
    state.model.observed = 0
    assert moved(state) == []


@pytest.mark.parametrize(("recovery", "count"), [("box", 2), ("lumen", 0)])
def test_a_worker_that_is_back_is_sent_pages_when_it_has_shown_that_it_works(recovery: str, count: int) -> None:
    core = Core(state=box(4, recovery=recovery))
    core.check()
    answers = core.handle(e.WorkerReady(1.0, 1, 2, 1000, False))
    for number in (1, 2):
        answers += core.handle(e.StepCommitted(1.0, 1, 2, number, 1, 0, 100, 0.012, 900))
    assert not any(isinstance(command, c.PreRestore) for command in answers)
    answer = core.handle(e.StepCommitted(1.0, 1, 2, 3, 1, 0, 100, 0.012, 900))
    core.check()
    assert sum(isinstance(command, c.PreRestore) for command in answer) == count
    planned = [command for command in answer if isinstance(command, c.Planned)]
    assert [(p.cause, p.ways) for p in planned] == [("rebalance", ((0, "migrate", 1), (1, "migrate", 1)))][:count]
