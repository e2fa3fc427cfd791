"""Load estimates, holders and evictions, computed by hand. The step model is that of test_judgement."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_judgement import model, worker

from lumenbox.core import eviction
from lumenbox.core.placement import choose_holders, domain, loads, one_more
from lumenbox.core.state import CheckpointConfig, CoreConfig, CoreState, KvCheckpoint, Request, RequestPhase, Worker


def box(checkpoints: CheckpointConfig, *workers: Worker, recovery: str = "lumen") -> CoreState:
    config = CoreConfig(len(workers), 16, 100, 8192, recovery, True, checkpoints)
    return CoreState(config, {w.id: w for w in workers}, model=model())


def holding(number: int, pages: int, requests: int = 0, backlog: int = 0) -> Worker:
    held = worker(number, requests, backlog)
    held.held_pages = pages
    return held


def holders(state: CoreState, serving: int) -> tuple[int, ...]:
    return choose_holders(state, list(state.workers.values()), serving)


def test_load_in_pages_is_alpha_pages_and_beta_requests() -> None:
    state = box(
        CheckpointConfig(budget_pages=99, load_estimate="pages", alpha=2.0, beta=5.0),
        holding(0, 7, 3),
        holding(1, 0, 4),
    )
    assert loads(state, list(state.workers.values())) == [2 * 7 + 5 * 3, 5 * 4]


def test_load_in_seconds_is_the_wait_and_the_time_to_restore_what_is_held() -> None:
    """Queue of w0: 100 tokens at 1 ms. 50 pages of 1 MB at 1 GB/s: 50 ms, times lambda 2. What decodes is no queue."""
    checkpoints = CheckpointConfig(budget_pages=99, page_bytes=10**6, bandwidth_bytes_s=1e9, lam=2.0)
    state = box(checkpoints, holding(0, 50, 3, 100), holding(1, 0))
    assert loads(state, list(state.workers.values())) == pytest.approx([0.1 + 2 * 0.05, 0.0])
    state.arena.bandwidth_bytes_s = 5e8
    assert loads(state, [state.workers[0]]) == pytest.approx([0.1 + 2 * 0.1])


def test_the_holder_has_the_least_load_of_all_but_the_serving_worker_ties_by_number() -> None:
    checkpoints = CheckpointConfig(budget_pages=99, load_estimate="pages")
    state = box(checkpoints, holding(0, 0), holding(1, 5), holding(2, 3), holding(3, 3))
    assert holders(state, serving=0) == (2,)
    assert holders(state, serving=2) == (0,)
    assert holders(state, serving=3) == (0,)


def test_the_two_estimates_may_disagree() -> None:
    """w1 holds less, w2 waits less: 5 + 0 pages against 9 s, 0.021 s + 9 pages of 1 MB in 9 ms."""
    workers = (holding(0, 0), holding(1, 5, 1, 9000), holding(2, 9))
    seconds = CheckpointConfig(budget_pages=99, page_bytes=10**6, bandwidth_bytes_s=1e9)
    assert holders(box(seconds, *workers), 0) == (2,)
    pages = CheckpointConfig(budget_pages=99, load_estimate="pages")
    assert holders(box(pages, *workers), 0) == (1,)


def test_a_full_budget_is_avoided_where_another_has_room() -> None:
    checkpoints = CheckpointConfig(budget_pages=9, load_estimate="pages", beta=100.0)
    assert holders(box(checkpoints, holding(0, 0), holding(1, 9), holding(2, 3, 7)), 0) == (2,)
    assert holders(box(checkpoints, holding(0, 0), holding(1, 9), holding(2, 9, 7)), 0) == (1,)


@pytest.mark.parametrize(("serving", "holder"), [(0, 1), (1, 2), (2, 0)])
def test_fixed_is_the_next_in_the_ring(serving: int, holder: int) -> None:
    state = box(CheckpointConfig(budget_pages=9), holding(0, 0), holding(1, 9), holding(2, 0), recovery="fixed")
    assert holders(state, serving) == (holder,)
    others = [w for w in state.workers.values() if w.id != holder]
    assert choose_holders(state, others, serving) == ((3 - serving - holder) % 3,)


def test_who_is_alone_holds_its_own_in_the_memory_of_the_box() -> None:
    state = box(CheckpointConfig(budget_pages=9), holding(0, 0), holding(1, 0))
    assert choose_holders(state, [state.workers[0]], 0) == (0,)
    assert choose_holders(state, [state.workers[1]], 1) == (1,)


def test_no_placement_no_holder() -> None:
    assert holders(box(CheckpointConfig(budget_pages=9), holding(0, 0), holding(1, 0), recovery="restart"), 0) == ()


def test_replicas_are_in_domains_of_their_own_apart_from_the_worker() -> None:
    domains = ((0, 1), (2, 3), (4,))
    checkpoints = CheckpointConfig(budget_pages=99, load_estimate="pages", replicas=2, failure_domains=domains)
    state = box(checkpoints, *(holding(n, 10 - n) for n in range(5)))
    assert holders(state, serving=0) == (4, 3)
    assert holders(state, serving=4) == (3, 1)
    two = CheckpointConfig(budget_pages=99, load_estimate="pages", replicas=2, failure_domains=((0, 1), (2, 3)))
    state = box(two, *(holding(n, 10 - n) for n in range(4)))
    assert holders(state, serving=0) == (3, 1), "the second may stand beside the worker, never beside the first"
    assert one_more(state, list(state.workers.values()), 0, (3, 1), 1) is None


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), min_size=1, max_size=8),
    st.sampled_from(((), ((0, 1), (2, 3, 4)), ((0, 1, 2, 3, 4, 5, 6, 7),), ((1, 7), (2, 6)))),
    st.integers(1, 3),
    st.sampled_from(("pages", "seconds")),
    st.sampled_from(("fixed", "load-aware")),
    st.integers(0, 7),
)
def test_replicas_never_share_a_domain(
    load: list[tuple[int, int]],
    domains: tuple[tuple[int, ...], ...],
    replicas: int,
    estimate: str,
    placement: str,
    serving: int,
) -> None:
    checkpoints = CheckpointConfig(
        budget_pages=20, replicas=replicas, failure_domains=domains, load_estimate=estimate, placement=placement
    )
    state = box(checkpoints, *(holding(n, pages, requests) for n, (pages, requests) in enumerate(load)))
    chosen = holders(state, serving % len(load))
    found = [domain(checkpoints, holder) for holder in chosen]
    assert 1 <= len(chosen) <= replicas
    assert len(set(found)) == len(found)
    apart = {domain(checkpoints, n) for n in range(len(load))} - {domain(checkpoints, serving % len(load))}
    assert found[0] in apart or not apart


# -- evictions -----------------------------------------------------------------------------------------------------

CANDIDATES = {  # sealed, grown at, priority
    1: (5, 1.0, 0),
    2: (2, 9.0, 0),
    3: (7, 2.0, 4),
    4: (0, 3.0, 0),
}
PHASES = {4: RequestPhase.ASSIGNED}
"""Its pages are being loaded: it is nobody's victim."""


@pytest.mark.parametrize(
    ("policy", "asking", "victim"),
    [
        ("shortest_prefix", (3, 10.0, 0), 2),
        ("shortest_prefix", (2, 10.0, 0), None),
        ("lru", (0, 10.0, 0), 1),
        ("lru", (0, 1.0, 0), None),
        ("priority", (0, 10.0, 3), 3),
        ("priority", (3, 10.0, 4), None),
        ("priority", (3, 10.0, 0), 3),
    ],
)
def test_the_lowest_rank_makes_room_for_a_higher_one(
    policy: str, asking: tuple[int, float, int], victim: int | None
) -> None:
    state = box(CheckpointConfig(budget_pages=9, eviction=policy), holding(0, 0), holding(1, 0))
    for req, (sealed, grown_at, priority) in CANDIDATES.items():
        phase = PHASES.get(req, RequestPhase.RUNNING)
        state.requests[req] = Request(req, req, 100, 50, priority, 0.0, phase, worker=0)
        state.arena.checkpoints[req] = KvCheckpoint((1,), grown_at, sealed=sealed)
        state.workers[1].holds[req] = True
    sealed, grown_at, priority = asking
    who = Request(9, 9, 100, 50, priority, 0.0)
    assert eviction.victim(state, 1, who, KvCheckpoint((1,), grown_at, sealed=sealed)) == victim


def test_ties_go_by_number() -> None:
    state = box(CheckpointConfig(budget_pages=9), holding(0, 0), holding(1, 0))
    for req in (5, 3):
        state.requests[req] = Request(req, req, 100, 50, 0, 0.0, RequestPhase.RUNNING, worker=0)
        state.arena.checkpoints[req] = KvCheckpoint((1,), 0.0, sealed=1)
        state.workers[1].holds[req] = True
    assert eviction.victim(state, 1, Request(9, 9, 100, 50, 0, 0.0), KvCheckpoint((1,), 0.0, sealed=2)) == 3
