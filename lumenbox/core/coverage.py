"""How well requests are covered by KV checkpoints: numbers for status, events, metrics (EVALUATION §3)."""

from __future__ import annotations

from collections.abc import Mapping

from lumenbox.core.state import CoreState, Request, RequestPhase


def coverage(state: CoreState) -> float:
    """Share of running requests with at least one sealed page; 1 when none runs."""
    running = _running(state)
    return sum(1 for request in running if state.num_sealed(request.req)) / len(running) if running else 1.0


def lag_tokens(state: CoreState, computed: Mapping[int, int]) -> float:
    """Mean over running requests of the tokens whose KV exists and is not sealed, the half-filled last page included.

    `computed` is how many tokens have KV, by request (the mirrors know); without it whole pages are counted.
    """
    size, running = state.config.page_size, _running(state)
    lags = [computed.get(r.req, r.pages * size) - state.num_sealed(r.req) * size for r in running]
    return sum(max(0, lag) for lag in lags) / len(lags) if lags else 0.0


def holder_balance(state: CoreState) -> float:
    """Most pages on a budget / fewest; 1 when nothing is held, infinite where one holds none."""
    held = [w.held_pages for w in state.workers.values()]
    if not any(held):
        return 1.0
    return max(held) / min(held) if min(held) else float("inf")


def _running(state: CoreState) -> list[Request]:
    return [request for request in state.requests.values() if request.phase == RequestPhase.RUNNING]
