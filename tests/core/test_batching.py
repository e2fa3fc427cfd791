"""The scheduler's promises, as histories of arrivals, steps, cancellations and deaths."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import PAGE, Rig

from lumenbox.core.batching import OVERTAKES, Report

MOMENTS = ("idle", "planned", "computing", "committed", "reported")
PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=20)
ARRIVE = st.tuples(
    st.just("arrive"), PROMPTS, st.integers(1, 10), st.integers(0, 2), st.sampled_from([(), (7,), (5, 9, 14)])
)
STEP = st.tuples(st.just("step"), st.one_of(st.none(), st.integers(1, 8)))
CANCEL = st.tuples(st.just("cancel"), st.integers(0, 30))
DIE = st.tuples(st.just("die"), st.sampled_from(MOMENTS), st.sets(st.integers(0, 30)), st.booleans())
HISTORIES = st.lists(st.one_of(ARRIVE, STEP, STEP, STEP, CANCEL, DIE), max_size=40)
RIGS = st.builds(
    Rig,
    num_pages=st.integers(10, 16),
    max_num_seqs=st.integers(1, 5),
    token_budget=st.integers(5, 12),
    max_model_len=st.just(36),
)


@settings(max_examples=400)
@given(RIGS, HISTORIES)
def test_any_history_ends_every_request_once_with_the_tokens_of_its_failure_free_run(
    rig: Rig, history: list[tuple]
) -> None:
    """After each frame the mirror equals the scheduler, and points at intact bytes whatever the worker does next."""
    for verb, *arguments in history:
        match verb:
            case "arrive":
                rig.arrive(*arguments)
            case "step":
                rig.step(*arguments)
            case "cancel" if rig.asked:
                rig.cancel(arguments[0] % len(rig.asked))
            case "die":
                moment, stays, all_stay = arguments
                rig.die(moment, None if all_stay else stays)
    rig.run()
    rig.check_answers()
    pool = rig.scheduler.pool
    assert pool.num_free + pool.num_cached == rig.num_pages


# -- order ---------------------------------------------------------------------------------------------------------


def admitted(report: Report | None) -> list[int]:
    assert report is not None
    return [rid for rid, _, _ in report.admitted]


def preempted_next(rig: Rig) -> list[int]:
    while (report := rig.step()) is not None:
        if report.preempted:
            return report.preempted
    raise AssertionError("all ended without a preemption")


def ends(rig: Rig) -> list[int]:
    """Requests in the order in which they end."""
    order: list[int] = []
    while (report := rig.step()) is not None:
        order += [rid for rid, _, _ in report.finished]
    return order


def test_lower_priority_numbers_go_first_and_equals_in_order_of_arrival() -> None:
    rig = Rig(max_num_seqs=1)
    rids = [rig.arrive([rid, 1], max_tokens=1, priority=p) for rid, p in enumerate((1, 0, 1, 0))]
    assert ends(rig) == [rids[1], rids[3], rids[0], rids[2]]


def test_a_preempted_request_goes_before_its_equals_but_not_before_its_betters() -> None:
    rig = Rig(num_pages=4, max_num_seqs=2, max_model_len=16)
    _, young = rig.arrive([1, 1, 1], 12, priority=1), rig.arrive([2, 1, 1], 12, priority=1)
    rig.step()
    better, equal = rig.arrive([3, 3, 3], 2, priority=0), rig.arrive([4, 4, 4], 2, priority=1)
    assert preempted_next(rig) == [young]
    assert [seq.rid for seq in rig.scheduler.waiting] == [better, young, equal]
    rig.run()
    rig.check_answers()


def test_decodes_run_in_every_step_beside_a_long_prefill() -> None:
    rig = Rig(num_pages=16, token_budget=4)
    short = rig.arrive([1, 1], max_tokens=8)
    rig.step()
    rig.arrive([2] * 20, max_tokens=1)
    for _ in range(6):
        report = rig.step()
        assert report is not None
        assert short in [rid for rid, _, _ in report.tokens]
    assert rig.shapes[1:] == [(1, 3)] * 6


def test_the_prefill_limit_holds_only_beside_decodes() -> None:
    rig = Rig(token_budget=8)
    rig.arrive([1] * 8, max_tokens=4)
    rig.step(prefill_limit=2)
    rig.arrive([2] * 8)
    rig.step(prefill_limit=2)
    assert rig.shapes == [(0, 8), (1, 2)]


def test_a_short_prompt_is_not_blocked_by_a_long_one_that_prefills() -> None:
    rig = Rig(num_pages=16, token_budget=6)
    rig.arrive([2] * 20, max_tokens=1)
    rig.step()
    short = rig.arrive([1, 1, 1], max_tokens=1)
    report = rig.step()
    assert report is not None
    assert report.finished == [(short, 0, "length")]


# -- pages ---------------------------------------------------------------------------------------------------------


def test_a_request_that_fits_passes_one_that_waits_for_pages() -> None:
    rig = Rig(num_pages=8)
    rig.arrive([1] * 8, max_tokens=8)
    rig.step()
    big, small = rig.arrive([2] * 24, max_tokens=1), rig.arrive([3], max_tokens=1)
    assert admitted(rig.step()) == [small]
    assert big in ends(rig)


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_big_prompt_is_overtaken_by_so_many_and_no_more(at_once: int) -> None:
    """Small ones keep coming; a long answer holds the pages all the while."""
    rig = Rig(num_pages=60, max_num_seqs=4, max_model_len=220)
    rig.arrive([1] * 60, max_tokens=150)
    rig.step()
    big = rig.arrive([2] * 219, max_tokens=1)
    passed = 0
    while big not in rig.scheduler.running:
        for _ in range(at_once):
            rig.arrive([3, len(rig.asked)], max_tokens=1)
        passed += len(set(admitted(rig.step())) - {big})
    assert passed == OVERTAKES


def test_a_big_restore_is_overtaken_by_so_many_and_no_more() -> None:
    """It needs all its pages at once, and small requests would take them one by one for ever."""
    rig = Rig(num_pages=60, max_num_seqs=4, max_model_len=220)
    long = rig.arrive([1] * 60, max_tokens=150)
    while rig.scheduler.running.get(long) is None or rig.scheduler.running[long].num_missing > 1:
        rig.step()
    big = rig.arrive([2] * 219, max_tokens=1, sealed=54)
    passed = 0
    while big not in rig.scheduler.running:
        rig.arrive([3, len(rig.asked)], max_tokens=1)
        rig.restore()
        came = admitted(rig.step())
        passed += len(came[: came.index(big)] if big in came else came)
    assert passed == OVERTAKES
    rig.run()
    rig.check_answers()


@pytest.mark.parametrize(("seats", "restores"), [(2, 3), (8, 48), (64, 100)])
def test_however_many_are_restored_none_bars_the_way_for_ever(seats: int, restores: int) -> None:
    """The longest is passed over by the shorter ones, until nobody may start before it."""
    rig = Rig(num_pages=2000, max_num_seqs=seats, token_budget=128, max_model_len=300)
    for number in range(seats):
        rig.arrive([number + 1] * 4, max_tokens=5 + 3 * (number % 5))
    rig.step()
    rig.arrive([2] * 241, max_tokens=3, sealed=60)
    for number in range(restores - 1):
        sealed = 5 + number % 15
        rig.arrive([100 + number] * (PAGE * sealed + 1), max_tokens=3 + number % 7, sealed=sealed)
    for _ in range(2000):
        rig.restore()
        if rig.step() is None:
            break
    assert rig.scheduler.idle
    rig.check_answers()


def test_pages_are_loaded_for_those_that_have_a_seat() -> None:
    """Else they would lie about as prefix cache, and be evicted before their request starts."""
    rig = Rig(num_pages=30, max_num_seqs=2)
    rig.arrive([1] * 4, max_tokens=8)
    first, second = (rig.arrive([2 + n] * 9, max_tokens=2, sealed=2) for n in range(2))
    rig.step()
    assert (rig.restore(), rig.restore()) == (first, None), "one seat is left"
    assert first in admitted(rig.step())
    assert rig.restore() is None
    while first in rig.scheduler.running:
        rig.step()
    assert rig.restore() == second
    rig.run()
    rig.check_answers()


def test_waiting_alone_is_no_overtaking() -> None:
    """One that nobody passed for long still lets small ones by when they come."""
    rig = Rig(num_pages=60, max_model_len=220)
    rig.arrive([1] * 60, max_tokens=150)
    rig.step()
    rig.arrive([2] * 219, max_tokens=1)
    for _ in range(OVERTAKES + 5):
        rig.step()
    small = rig.arrive([3], max_tokens=1)
    assert admitted(rig.step()) == [small]


def test_preemption_takes_the_youngest_and_costs_it_no_token() -> None:
    rig = Rig(num_pages=6, max_num_seqs=3, max_model_len=24)
    rids = [rig.arrive([rid + 1] * 3, max_tokens=20) for rid in range(3)]
    assert preempted_next(rig) == [rids[2]]
    assert preempted_next(rig) == [rids[1]]
    rig.run()
    rig.check_answers()


def test_one_that_fills_the_pool_alone_runs_to_its_end() -> None:
    rig = Rig(num_pages=5, max_model_len=20)
    for first in (1, 2):
        rig.arrive([first] * 15, max_tokens=99)
    rig.run()
    rig.check_answers()


# -- the prefix cache ----------------------------------------------------------------------------------------------


def test_twins_wait_for_one_anothers_prefill_and_share_its_pages() -> None:
    rig = Rig(num_pages=16, token_budget=8)
    prompt = [1, 2, 1, 2, 2, 1, 1, 2, 1, 1, 1, 2, 2]
    first, *siblings = [rig.arrive(prompt, max_tokens=6) for _ in range(3)]
    assert admitted(rig.step()) == [first]
    assert admitted(rig.step()) == [first][:0]
    report = rig.step()
    assert report is not None
    assert [(rid, cached) for rid, _, cached in report.admitted] == [(rid, 12) for rid in siblings]
    rig.step()
    tables = [rig.scheduler.running[rid].page_table for rid in (first, *siblings)]
    assert len({tuple(table[:3]) for table in tables}) == 1
    assert len({table[3] for table in tables}) == 3
    assert sum(prefill for _, prefill in rig.shapes) == len(prompt)
    rig.run()
    rig.check_answers()


def test_a_twin_goes_on_alone_when_the_first_leaves() -> None:
    rig = Rig(token_budget=4)
    first, twin = (rig.arrive([1] * 13, max_tokens=2) for _ in range(2))
    rig.step()
    rig.cancel(first)
    report = rig.step()
    assert report is not None
    assert report.admitted == [(twin, 0, 4)]
    rig.run()
    rig.check_answers()


def test_the_whole_prompt_in_the_cache_still_computes_its_last_token() -> None:
    rig = Rig()
    for _ in range(2):
        rid = rig.arrive([1, 2] * PAGE, max_tokens=1)
        report = rig.step()
    assert report is not None
    assert report.admitted == [(rid, 0, PAGE)]


def test_a_longer_prompt_hits_the_answer_of_the_turn_before() -> None:
    rig = Rig(num_pages=16)
    first = rig.arrive([1] * 6, max_tokens=7)
    rig.run()
    whole = len(rig.asked[first].tokens) - 1
    rid = rig.arrive([*rig.asked[first].tokens, 5, 5], max_tokens=1)
    report = rig.step()
    assert report is not None
    assert report.admitted == [(rid, 0, whole // PAGE * PAGE)]


# -- death and re-attach -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("after", range(7))
def test_a_reattach_continues_where_the_last_frame_ended(moment: str, after: int) -> None:
    rig = Rig(num_pages=12, token_budget=6)
    for first in (1, 2, 1):
        rig.arrive([first] * 9, max_tokens=8)
    for _ in range(after):
        rig.step()
    computed = dict(rig.mirror.computed)
    rig.die(moment)
    adopted = {rid: seq.num_computed for rid, seq in rig.scheduler.running.items()}
    assert adopted == {rid: count for rid, count in computed.items() if count}
    rig.run()
    rig.check_answers()


def test_the_half_filled_page_is_left_behind_and_whole_pages_stay() -> None:
    rig = Rig()
    rid = rig.arrive([1] * 6, max_tokens=6)
    rig.step()
    before = rig.mirror.tables[rid].copy()
    rig.die("computing")
    report = rig.step()
    assert report is not None
    ((told, index, page),) = report.replaced
    assert (told, index) == (rid, 1)
    assert page not in before
    assert rig.mirror.tables[rid] == [before[0], page]


def test_a_client_that_leaves_during_the_reattach_takes_its_pages_along() -> None:
    """The cancellation is obeyed before the first frame, which then tells of an adoption and its end at once."""
    rig = Rig()
    rid, other = rig.arrive([1] * 6, max_tokens=6), rig.arrive([2] * 7, max_tokens=6)
    rig.step()
    rig.step()
    rig.die("idle")
    rig.cancel(rid)
    rig.step()
    assert set(rig.mirror.tables) == {other}
    rig.run()
    rig.check_answers()


def test_a_twin_waits_for_a_prefill_that_was_adopted_in_the_middle() -> None:
    rig = Rig(num_pages=16, token_budget=6)
    first = rig.arrive([1] * 13, max_tokens=8)
    rig.step()
    rig.die("idle")
    twin = rig.arrive([1] * 13, max_tokens=1)
    admissions = []
    while twin not in rig.scheduler.running:
        admissions += rig.step().admitted
    assert admissions == [(first, 1, 6), (twin, 0, 12)]


def test_the_prefix_cache_survives_its_worker() -> None:
    rig = Rig()
    rig.arrive([1] * 9, max_tokens=1)
    rig.run()
    rig.die("idle")
    rid = rig.arrive([1] * 9, max_tokens=1)
    report = rig.step()
    assert report is not None
    assert report.admitted == [(rid, 0, 8)]


def test_a_request_is_dropped_under_its_own_epoch_only() -> None:
    rig = Rig()
    rid = rig.arrive([1, 2], max_tokens=4)
    assert not rig.scheduler.drop(rid, 1)
    rig.step()
    assert not rig.scheduler.drop(rid, 1)
    assert not rig.scheduler.drop(rid + 1, 0)
    rig.run()
    rig.check_answers()
