"""Recovery routing and the cost J, computed by hand. The step model is that of test_judgement:
10 ms + 1 ms a decode + 1 ms a prefill token + 1 ms per 1,024 tokens of context."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_judgement import model, worker

from lumenbox.core.box import by_cost, restart
from lumenbox.core.events import Interrupted
from lumenbox.core.lanes import Job, heirs_lanes, job_of, lane_of, price
from lumenbox.core.recovery import STRATEGIES, in_order, plan
from lumenbox.core.rerouting import by_mean, by_threshold, holder, least_loaded
from lumenbox.core.state import CheckpointConfig, CoreConfig, CoreState, KvCheckpoint, Request, Worker
from lumenbox.core.ways import Case, Way

MB = 10**6


def case(
    survivors: list[Worker],
    saved: dict[int, tuple[int, int]],
    recovery: str = "lumen",
    rebirth_s: float = float("inf"),
    can_reattach: bool = False,
    **parts: Any,
) -> Case:
    """Worker 0 is dead; `saved` is (holder, sealed pages) by request. A page takes 10 ms to load."""
    dead = worker(0)
    dead.pages = dead.free_pages = 1000
    checkpoints = CheckpointConfig(budget_pages=99, page_bytes=MB, bandwidth_bytes_s=100 * MB, **parts)
    config = CoreConfig(1 + len(survivors), 16, 100, 8192, recovery, True, checkpoints)
    state = CoreState(config, {w.id: w for w in [dead, *survivors]}, model=model(), birth_s=1.0)
    for req, (held_by, pages) in saved.items():
        slots = [(100 * req + n,) for n in range(pages)]
        state.arena.checkpoints[req] = KvCheckpoint((held_by,), 0.0, slots, pages)
    return Case(state, dead, survivors, can_reattach, rebirth_s)


def lost(*reqs: int, tokens: int = 100) -> list[Interrupted]:
    return [Interrupted(req, tokens, tokens - 1) for req in reqs]


# -- holder --------------------------------------------------------------------------------------------------------


def test_all_go_to_their_holders_those_without_to_the_least_loaded() -> None:
    """Request 3's holder is gone: it goes to w1, whose wait is then its tail of 36 ms longer, so 4 goes to w2."""
    found = holder(case([worker(1), worker(2, requests=3)], {1: (2, 3), 2: (1, 1), 3: (7, 4)}), lost(1, 2, 3, 4))
    assert found == {1: Way("restore", 2), 2: Way("restore", 1), 3: Way("restore", 1), 4: Way("recompute", 2)}


def test_fixed_sends_all_to_the_next_in_the_ring() -> None:
    found = holder(case([worker(1, requests=5), worker(2)], {1: (1, 3)}, recovery="fixed"), lost(1, 2))
    assert found == {1: Way("restore", 1), 2: Way("recompute", 1)}
    found = holder(case([worker(2), worker(3)], {1: (1, 3)}, recovery="fixed"), lost(1, 2))
    assert found == {1: Way("restore", 2), 2: Way("recompute", 2)}


@pytest.mark.parametrize("name", ["restart", "fixed", "lumen", "box"])
def test_without_survivors_all_are_held(name: str) -> None:
    assert STRATEGIES[name](case([], {1: (1, 3)}, recovery=name), lost(1, 2)) == {1: Way("hold"), 2: Way("hold")}


# -- the rule `mean` -----------------------------------------------------------------------------------------------


def test_mean_sheds_the_shortest_prefixes_of_a_holder_above_the_mean() -> None:
    """2 + 0 + 1 running and 5 assigned: the mean is 8 / 3, rounded up 3. w1 keeps one of its five, the longest. The
    others go, shortest first, to w2 (0), w2 (1 each: the lower number), w3, and w2 again."""
    survivors = [worker(1, requests=2), worker(2), worker(3, requests=1)]
    saved = {1: (1, 3), 2: (1, 1), 3: (1, 5), 4: (1, 2), 5: (1, 4)}
    found = by_mean(case(survivors, saved), lost(1, 2, 3, 4, 5))
    assert {req: way.heir for req, way in found.items()} == {2: 2, 4: 2, 1: 3, 5: 2, 3: 1}
    assert {way.way for way in found.values()} == {"restore"}


def test_mean_leaves_holders_alone_that_are_not_above_it() -> None:
    survivors = [worker(1), worker(2)]
    found = by_mean(case(survivors, {1: (1, 3), 2: (2, 1), 3: (1, 2)}), lost(1, 2, 3))
    assert found == {1: Way("restore", 1), 2: Way("restore", 2), 3: Way("restore", 1)}


def test_mean_fills_up_with_those_that_have_no_holder() -> None:
    found = by_mean(case([worker(1, requests=4), worker(2, requests=1)], {1: (2, 3)}), lost(1, 2, 3))
    assert found == {1: Way("restore", 2), 2: Way("recompute", 2), 3: Way("recompute", 2)}


# -- the rule `threshold` ------------------------------------------------------------------------------------------


def test_threshold_spares_a_loaded_holder_unless_the_prefix_is_long() -> None:
    """In pages, alpha 1, beta 10: L(w1) = 30, L(w2) = 0, theta 20. 5 pages are 80 tokens, more than tau. Request 1 goes
    to w2 by its wait, and 4 then to w1."""
    parts = {"load_estimate": "pages", "beta": 10.0, "theta": 20.0, "tau": 64.0, "routing_rule": "threshold"}
    survivors = [worker(1, requests=3), worker(2)]
    saved = {1: (1, 4), 2: (1, 5), 3: (2, 1)}
    found = by_threshold(case(survivors, saved, **parts), lost(1, 2, 3, 4))
    assert found == {1: Way("restore", 2), 2: Way("restore", 1), 3: Way("restore", 2), 4: Way("recompute", 1)}
    assert plan(case(survivors, saved, **parts), lost(1, 2, 3)) == {req: found[req] for req in (1, 2, 3)}


def test_threshold_in_seconds() -> None:
    """L(w1) = 0: no queue, nothing held. At or below theta: to its holder; with a theta below any load elsewhere."""
    found = by_threshold(case([worker(1, requests=2), worker(2)], {1: (1, 1)}, theta=0.03, tau=1e9), lost(1))
    assert found == {1: Way("restore", 1)}
    found = by_threshold(case([worker(1, requests=2), worker(2)], {1: (1, 1)}, theta=-1.0, tau=1e9), lost(1))
    assert found == {1: Way("restore", 2)}


def test_order_shortest_restore_first_then_what_is_computed_again() -> None:
    about = case([worker(1)], {1: (1, 5), 3: (1, 2)})
    assert list(in_order(about, least_loaded(about, lost(4, 1, 2, 3)))) == [3, 1, 4, 2]


def test_a_routing_that_is_named_replaces_the_strategys() -> None:
    about = case([worker(1, requests=5), worker(2)], {1: (1, 5)}, routing="least-loaded")
    assert plan(about, lost(1)) == {1: Way("restore", 2)}
    about = case([worker(1, requests=5), worker(2)], {1: (1, 5)}, recovery="box", routing="holder")
    assert plan(about, lost(1)) == {1: Way("restore", 1)}


# -- J, term by term -----------------------------------------------------------------------------------------------


def job(about: Case, tokens: int = 100, req: int = 1) -> Job:
    return job_of(about, Interrupted(req, tokens, tokens - 1))


def test_restore_waits_for_both_lanes_and_prefills_the_tail() -> None:
    """4 pages sealed: copied in 40 ms; tail 36; start 10 + 13 ms. t = 40 + 23 + 36 ms, two residents lose 36 each."""
    about = case([worker(1, requests=2)], {1: (1, 4)})
    lane = lane_of(about, about.survivors[0])
    assert lane.restore(job(about)) == pytest.approx(0.099 + 2 * 0.036)
    busy = case([worker(1, requests=2, backlog=100)], {1: (1, 4)})
    assert lane_of(busy, busy.survivors[0]).restore(job(busy)) == pytest.approx(0.1 + 0.059 + 2 * 0.036)


def test_recompute_prefills_all() -> None:
    about = case([worker(1, requests=2)], {})
    assert lane_of(about, about.survivors[0]).recompute(job(about)) == pytest.approx(0.123 + 2 * 0.1)


def test_lanes_fill_up() -> None:
    """After the first, the copy lane is busy for 40 ms, the prefill lane for 76; the second is copied at 80."""
    about = case([worker(1, requests=2)], {1: (1, 4), 2: (1, 4)})
    lane = lane_of(about, about.survivors[0])
    lane.take(job(about), restores=True)
    assert (lane.copy_free, lane.prefill_free, lane.residents) == (pytest.approx(0.04), pytest.approx(0.076), 3)
    assert lane.restore(job(about, req=2)) == pytest.approx(0.08 + 0.059 + 3 * 0.036)
    lane.take(job(about, req=3), restores=False)
    assert lane.prefill_free == pytest.approx(0.176)


def test_what_is_late_costs_twice_and_a_slow_worker_is_slow() -> None:
    """Recompute of 2,000 on a worker at half pace: 2 * 2.021 s."""
    about = case([worker(1)], {})
    about.survivors[0].set_pace(2.0)
    assert lane_of(about, about.survivors[0]).recompute(job(about, 2000)) == pytest.approx(4.042 + 3.042)


def test_missing_pages_cost_the_time_in_which_they_come_free() -> None:
    """100 tokens and 10 to draw: 7 pages; 5 free less one for each of two residents: 4 missing, 13 ms * 16 / 2 each."""
    about = case([worker(1, requests=2, free=5)], {})
    about.state.requests[1] = Request(1, 1, 100, 50, 0, 0.0, limit=110)
    assert job(about).pages == 7
    lane = lane_of(about, about.survivors[0])
    assert lane.recompute(job(about)) == pytest.approx(0.123 + 4 * 0.104 + 2 * 0.1)


def test_two_in_a_hundred_pages_stay_free() -> None:
    about = case([worker(1, requests=2, free=50)], {})
    about.survivors[0].pages = 1000
    assert lane_of(about, about.survivors[0]).spare == 50 - 2 - 20


def test_the_less_important_weigh_less() -> None:
    about = case([worker(1)], {})
    about.state.requests[1] = Request(1, 1, 100, 50, 1, 0.0, limit=100)
    assert lane_of(about, about.survivors[0]).recompute(job(about)) == pytest.approx(0.121 / 2)


def test_a_reattach_costs_the_birth_and_a_step() -> None:
    """1 s of birth, a step of 10 ms and 100 tokens of context; what is beyond 1 s twice."""
    about = case([worker(1)], {}, can_reattach=True)
    t = 1.01 + 100 / 1024 / 1000
    assert job(about).home == pytest.approx(t + (t - 1))
    assert job_of(about, Interrupted(1, 100, 0)).home == float("inf")


def test_the_newborn_is_an_heir_after_its_birth_unless_requests_come_home_to_it() -> None:
    about = case([worker(1)], {}, rebirth_s=3.0)
    lanes = heirs_lanes(about)
    assert set(lanes) == {1, -1}
    assert lanes[-1].recompute(job(about)) == pytest.approx(3.121 + 2.121)
    assert set(heirs_lanes(case([worker(1)], {}, rebirth_s=3.0, can_reattach=True))) == {1}


# -- box -----------------------------------------------------------------------------------------------------------


def test_box_restores_where_it_is_shorter_and_spreads() -> None:
    """Four equal restores on two idle survivors."""
    about = case([worker(1), worker(2)], {req: (1, 6) for req in range(1, 5)}, recovery="box")
    found = plan(about, lost(1, 2, 3, 4))
    assert sorted(way.heir for way in found.values()) == [1, 1, 2, 2]
    assert {way.way for way in found.values()} == {"restore"}


def test_box_recomputes_what_is_slower_to_copy() -> None:
    about = case([worker(1)], {1: (1, 6)}, recovery="box")
    about.state.arena.bandwidth_bytes_s = 1.0 * MB
    assert plan(about, lost(1)) == {1: Way("recompute", 1)}


def test_box_holds_for_the_newborn_what_would_be_late_everywhere() -> None:
    about = case([worker(1, requests=1, backlog=8000)], {}, recovery="box", rebirth_s=0.5)
    assert plan(about, lost(1)) == {1: Way("hold")}


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 6), st.integers(0, 25), st.booleans(), st.sampled_from((1.0, 20.0, 1e3)), st.integers(0, 2**32))
def test_box_is_never_worse_than_restart_and_lumen(
    workers: int, requests: int, can_reattach: bool, rebirth_s: float, seed: int
) -> None:
    chance = random.Random(seed)
    survivors = [
        worker(n, chance.randrange(9), chance.choice((0, 0, 500, 5000)), chance.randrange(9000), chance.randrange(400))
        for n in range(1, workers)
    ]
    for survivor in survivors:
        survivor.set_pace(chance.choice((0.5, 1.0, 1.0, 3.0, 9.0)))
    saved = {req: (chance.randrange(1, 7), chance.randrange(1, 90)) for req in range(requests) if chance.random() < 0.7}
    about = case(survivors, saved, "box", rebirth_s, can_reattach)
    about.state.arena.bandwidth_bytes_s = chance.choice((0.0, 1e6, 1e9))
    interrupted = [
        Interrupted(r, n := chance.randrange(1500, 3000), chance.choice((0, n - 1))) for r in range(requests)
    ]
    jobs = {one.req: job_of(about, one) for one in interrupted}
    found = by_cost(about, interrupted)
    assert set(found) == set(jobs)
    for req, way in found.items():
        assert (way.way == "restore") <= (req in saved)
        assert way.heir in {w.id for w in survivors} if way.way in ("restore", "recompute") else True
        assert (way.way == "reattach") <= can_reattach
    cost = price(about, found, jobs)
    assert cost <= price(about, restart(about, interrupted), jobs)
    assert cost <= price(about, by_mean(about, interrupted), jobs)
