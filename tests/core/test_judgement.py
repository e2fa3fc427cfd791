"""Health, routing and the ways back, computed by hand. All use one model: 10 ms + 1 ms a decode + 1 ms a prefill token
+ 1 ms per 1,024 tokens of context."""

from __future__ import annotations

import msgspec
import pytest

from lumenbox.core.cost import SCALES, Shape, StepModel
from lumenbox.core.events import Interrupted
from lumenbox.core.health import GRAY_FACTOR, UNKNOWN_DEADLINE_S, deadline_s, is_gray, next_pace
from lumenbox.core.recovery import STRATEGIES, Case, Way
from lumenbox.core.routing import least_wait, predicted_wait_s
from lumenbox.core.state import CoreConfig, CoreState, Worker


def model() -> StepModel:
    return StepModel(
        coefficients=[0.01, 0.001 * SCALES[1], 0.001 * SCALES[2], 0.001 * SCALES[3] / 1024],
        observed=100,
        largest_decodes=8,
        largest_prefill=512,
    )


def worker(number: int, requests: int = 0, backlog: int = 0, context: int = 0, free: int = 1000) -> Worker:
    """With a backlog of that many tokens, all of one request."""
    owned = {1000 * (number + 1) + i: True for i in range(requests)}
    queue = dict.fromkeys(list(owned)[:1], backlog) if backlog else {}
    return Worker(
        number, requests=owned, backlog=queue, backlog_tokens=backlog, context_tokens=context, free_pages=free
    )


def state(*workers: Worker) -> CoreState:
    config = CoreConfig(len(workers), 16, 100, 8192, "box", True)
    return CoreState(config, {w.id: w for w in workers}, model=model(), birth_s=1.0)


# -- health --------------------------------------------------------------------------------------------------------


def test_a_deadline_is_three_times_the_step_and_some_grace() -> None:
    """10 + 4 + 100 + 2 ms = 0.116 s."""
    assert deadline_s(model(), 1.0, Shape(4, 100, 2048)) == pytest.approx(3 * 0.116 + 0.1)


def test_a_slow_worker_is_given_its_pace_a_fast_one_no_less() -> None:
    assert deadline_s(model(), 2.0, Shape(4, 100, 2048)) == pytest.approx(6 * 0.116 + 0.1)
    assert deadline_s(model(), 0.3, Shape(4, 100, 2048)) == pytest.approx(3 * 0.116 + 0.1)


@pytest.mark.parametrize("shape", [Shape(17, 0, 0), Shape(0, 1025, 0)])
def test_a_step_larger_than_any_seen_is_no_hang_for_long(shape: Shape) -> None:
    assert deadline_s(model(), 1.0, shape) == UNKNOWN_DEADLINE_S
    assert deadline_s(StepModel(), 1.0, Shape(1, 0, 0)) == UNKNOWN_DEADLINE_S


def test_the_pace_is_a_bounded_moving_mean() -> None:
    assert next_pace(1.0, 0.2, 0.1) == pytest.approx(1.1)
    assert next_pace(1.0, 1e9, 0.1) == pytest.approx(1 + 0.1 * 99)
    assert next_pace(1.0, 0.0, 0.1) == pytest.approx(1 - 0.1 * 0.75)


def test_gray_is_slower_than_the_median_peer_never_than_nobody() -> None:
    assert not is_gray(100.0, [])
    assert is_gray(GRAY_FACTOR + 0.1, [0.5, 1.0, 50.0])
    assert not is_gray(GRAY_FACTOR - 0.1, [0.5, 0.5, 0.5])
    assert not is_gray(7.0, [2.0, 2.0])


# -- routing -------------------------------------------------------------------------------------------------------


def test_the_wait_is_the_prefill_of_all_that_waits_and_one_step_of_everyone() -> None:
    """Prefill of 160: 170 ms. A step of 4 decodes over 4,096 tokens: 10 + 4 + 4 ms."""
    box = state(worker(0, requests=3, backlog=100, context=4096))
    assert predicted_wait_s(box, box.workers[0], 60) == pytest.approx(0.17 + 0.018)


def test_missing_pages_cost_the_steps_that_free_them() -> None:
    """160 tokens want 11 pages, 5 are free: 6 pages * 16 steps / 3 requests = 32 steps more."""
    box = state(worker(0, requests=3, backlog=100, context=4096, free=5))
    assert predicted_wait_s(box, box.workers[0], 60) == pytest.approx(0.17 + 33 * 0.018)


@pytest.mark.parametrize(("pace", "factor"), [(0.5, 1), (1, 1), (2, 2), (9, 4)])
def test_a_slow_worker_makes_one_wait_longer_up_to_a_bound(pace: float, factor: float) -> None:
    box = state(worker(0))
    box.workers[0].set_pace(pace)
    assert predicted_wait_s(box, box.workers[0], 100) == pytest.approx(factor * (0.11 + 0.011))


def test_ties_go_to_the_fewest_requests_then_to_the_lowest_number() -> None:
    box = state(worker(0), worker(1))
    assert least_wait(box, [*box.workers.values()], 10) is box.workers[0]
    assert least_wait(box, [], 10) is None
    free = StepModel(coefficients=[0.01, 0.0, 0.0, 0.0])
    box = state(worker(0, requests=2), worker(1, requests=1))
    box.model = free
    assert least_wait(box, [*box.workers.values()], 10) is box.workers[1]


# -- the ways back -------------------------------------------------------------------------------------------------


def ways(
    strategy: str, dead: Worker, survivors: list[Worker], lost: list[Interrupted], can_reattach: bool = True
) -> dict[int, Way]:
    case = Case(state(dead, *survivors), dead, survivors, can_reattach)
    return STRATEGIES[strategy](case, lost)


def test_none_ends_every_stream() -> None:
    assert ways("none", worker(0), [worker(1)], [Interrupted(1, 9, 8)]) == {1: Way("end")}


def test_restart_spreads_by_wait() -> None:
    """100 on w1, then w2 is idle, then 100 + 10 on either: the lower number."""
    lost = [Interrupted(req, tokens, tokens - 1) for req, tokens in ((1, 100), (2, 100), (3, 10))]
    heirs = ways("restart", worker(0), [worker(1), worker(2)], lost)
    assert heirs == {1: Way("recompute", 1), 2: Way("recompute", 2), 3: Way("recompute", 1)}


@pytest.mark.parametrize("strategy", ["restart", "box"])
def test_without_a_survivor_and_a_pool_everything_is_held(strategy: str) -> None:
    assert ways(strategy, worker(0), [], [Interrupted(1, 9, 8)], can_reattach=False) == {1: Way("hold")}


def test_box_takes_the_sooner_way_for_each() -> None:
    """Re-attach: 1 s of birth + 10 + 3 + 2 ms. Recompute of 2,000: 2.021 s; of 500: 0.521 s, being idle."""
    lost = [Interrupted(1, 2000, 1999), Interrupted(2, 500, 499)]
    chosen = ways("box", worker(0, requests=3), [worker(1)], lost)
    assert chosen == {1: Way("reattach", 0), 2: Way("recompute", 1)}


def test_box_lets_choose_first_who_has_most_to_lose() -> None:
    """J of 600 on w1: 0.621, of 700: 0.721; of a re-attach 1.012 + 0.012 late: 600 loses more by it. With 600 there,
    700 would take 1.321 s."""
    lost = [Interrupted(1, 600, 599), Interrupted(2, 700, 699)]
    chosen = ways("box", worker(0, requests=2), [worker(1)], lost)
    assert chosen == {1: Way("recompute", 1), 2: Way("reattach", 0)}


def test_box_reattaches_only_what_has_kv_and_a_pool() -> None:
    lost = [Interrupted(1, 2000, 0)]
    assert ways("box", worker(0), [worker(1)], lost) == {1: Way("recompute", 1)}
    lost = [Interrupted(1, 2000, 1999)]
    assert ways("box", worker(0), [worker(1)], lost, can_reattach=False) == {1: Way("recompute", 1)}
    assert ways("box", worker(0), [], lost) == {1: Way("reattach", 0)}


def test_a_half_prefilled_request_reattaches_with_the_rest_to_compute() -> None:
    """3,000 of which 2,500 are computed: 1 + 0.01 + 0.002 + 0.499 + 0.003 s beats 3 s."""
    chosen = ways("box", worker(0, requests=2), [worker(1)], [Interrupted(1, 3000, 2500)])
    assert chosen == {1: Way("reattach", 0)}
    chosen = ways("box", worker(0, requests=2), [worker(1)], [Interrupted(1, 3000, 100)])
    assert chosen == {1: Way("recompute", 1)}


def test_a_worker_whose_seats_are_taken_is_passed_over() -> None:
    """Two seats each: w0 has both taken and no backlog, w1 has one free behind a backlog of 5 ms."""
    box = state(worker(0, requests=2), worker(1, requests=1, backlog=5))
    box.config = CoreConfig(**{**msgspec.structs.asdict(box.config), "max_num_seqs": 2})
    heir = least_wait(box, [*box.workers.values()], 10)
    assert heir is not None and heir.id == 1
