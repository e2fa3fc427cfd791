"""Which requests move to a worker that is back. The step model is that of test_judgement: 10 ms + 1 ms a decode + 1 ms
a prefill token + 1 ms per 1,024 tokens of context."""

from __future__ import annotations

import pytest
from test_judgement import model

from lumenbox.core import commands as c
from lumenbox.core import events as e
from lumenbox.core.machine import FOLLOW_S, Core
from lumenbox.core.rebalancing import moves, with_room
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


def test_requests_on_their_way_count_where_they_go() -> None:
    """Two of nine leave w0 already, for w1: it has room for two more before both are alike."""
    state = box(9)
    for req in (0, 1):
        state.requests[req].heir = 1
    assert moved(state) == [2, 3]


def test_a_slow_worker_with_nothing_to_give_does_not_keep_others_from_giving() -> None:
    state = box(4)
    slowest = Worker(2, WorkerPhase.READY, free_pages=100, pace=3.0)
    state.workers[2] = slowest
    chosen = moves(state, state.workers[1], [state.workers[0], slowest])
    assert [request.req for request in chosen] == [0, 1]


def test_only_heirs_with_room() -> None:
    assert with_room(box(4), {0: 1, 1: 1}) == {0: 1, 1: 1}
    assert with_room(box(4, free=85), {0: 1, 1: 1}) == {0: 1}, "each takes 81 pages"


@pytest.mark.parametrize("holds_back", [False, True])
def test_a_request_follows_with_its_next_page_unless_none_is_sealed_now(holds_back: bool) -> None:
    """A worker that restores seals nothing; the restore may wait for the pages of the one that is to leave."""
    core = Core(state=box(4, sealed=63))
    for number in (1, 2, 3):
        core.state.workers[1].phase = WorkerPhase.READY
        core.handle(e.StepCommitted(1.0, 1, 2, number, 1, 0, 100, 0.012, 900))
    if holds_back:
        core.state.workers[0].restoring[3], core.state.workers[0].is_held_back = 0, True
    leave = [c.MoveOut(0, 0, 0)]
    answer = core.handle(e.RestoreDone(1.0, 1, 0, 0, 63, 1000, 0.01))
    assert answer == (leave if holds_back else [c.SetTimer("follow:0", 1.0 + FOLLOW_S)])
    if not holds_back:
        assert core.handle(e.PagesSealed(1.0, 0, ((0, 0, 64),))) == leave


@pytest.mark.parametrize(("event", "answer"), [
    (e.RestoreDone(1.0, 1, 0, 0, 0, 0, 0.0), [c.Stays(0)]),
    (e.WorkerExiting(1.0, 1, 2, "pidfd"), [c.Stays(0), c.Stays(1)]),
])  # fmt: skip
def test_who_loses_its_heir_stays_on_a_healthy_worker(event: e.AnyEvent, answer: list[c.Stays]) -> None:
    core = Core(state=box(4, sealed=63))
    core.state.workers[1].phase = WorkerPhase.READY
    for number in (1, 2, 3):
        core.handle(e.StepCommitted(1.0, 1, 2, number, 1, 0, 100, 0.012, 900))
    told = core.handle(event)
    assert [command for command in told if isinstance(command, (c.Stays, c.MoveOut))] == answer
    core.check()


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
