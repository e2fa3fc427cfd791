"""Which running requests move to a worker that has come back, so that all of them decode faster.

A move pays if what it saves over the next steps is more than what it costs: the pause of the one that moves, and the
time in which its pages are loaded among the residents of its heir. All in stream-seconds, by the box's step model.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lumenbox.core.cost import FIRST_OBSERVATIONS
from lumenbox.core.routing import LARGEST_PACE
from lumenbox.core.state import CoreState, Request, RequestPhase, Worker

HORIZON_STEPS = 256
"""A request is taken to draw so many more tokens at most."""
MARGIN = 2.0
"""The pause is certain, the gain is an estimate: it must be so many times as large."""


class _Load(msgspec.Struct):
    """What a worker's steps are made of, and the requests that may leave it."""

    worker: Worker
    pace: float
    residents: int
    context: int
    spare_pages: int
    movable: list[Request]

    def step_s(self, rates: tuple[float, float, float, float]) -> float:
        base, per_decode, _, per_context = rates
        return (base + per_decode * self.residents + per_context * self.context) * self.pace


def moves(state: CoreState, newcomer: Worker, others: Sequence[Worker]) -> list[Request]:
    """Requests of `others` to move to `newcomer`, in the order in which each gains most."""
    if state.model.observed < FIRST_OBSERVATIONS:
        return []
    rates = state.model.rates
    home, givers = _load(state, newcomer), [_load(state, worker) for worker in others]
    chosen: list[Request] = []
    while givers:
        giver = max(givers, key=lambda load: load.step_s(rates))
        best = max(giver.movable, key=lambda r: _gain_s(state, r, giver, home), default=None)
        if best is None or _gain_s(state, best, giver, home) <= 0:
            return chosen
        chosen.append(best)
        giver.movable.remove(best)
        for load, sign in ((giver, -1), (home, 1)):
            load.residents += sign
            load.context += sign * _tokens(state, best)
            load.spare_pages -= sign * _pages(state, best)
    return chosen


def _load(state: CoreState, worker: Worker) -> _Load:
    requests = [state.requests[req] for req in worker.requests]
    return _Load(
        worker,
        min(LARGEST_PACE, max(1.0, worker.pace)),
        len(requests),
        sum(_tokens(state, request) for request in requests),
        worker.free_pages,
        [request for request in requests if _may_move(state, worker, request)],
    )


def _may_move(state: CoreState, worker: Worker, request: Request) -> bool:
    """Only what can be restored elsewhere: to compute it again would cost more than it saves."""
    if request.phase != RequestPhase.RUNNING or request.heir >= 0 or request.req in worker.restoring:
        return False
    return _sealed(state, request) > 0


def _gain_s(state: CoreState, request: Request, giver: _Load, home: _Load) -> float:
    """Stream-seconds that its move saves, less what it costs."""
    config, (_, per_decode, per_token, per_context) = state.config, state.model.rates
    if home.residents >= config.max_num_seqs or _pages(state, request) > home.spare_pages:
        return 0.0
    tokens = _tokens(state, request)
    steps = _steps(request, tokens)
    its_s = per_decode + per_context * tokens
    before_s, after_s = giver.step_s(state.model.rates), home.step_s(state.model.rates) + its_s * home.pace
    saved_s = steps * ((giver.residents - 1) * its_s * giver.pace - home.residents * its_s * home.pace)
    saved_s += steps * (before_s - after_s)
    tail_s = per_token * config.page_size * home.pace
    copy_s = _sealed(state, request) * config.checkpoints.page_bytes / state.restore_bytes_s
    return saved_s - MARGIN * (before_s + after_s + tail_s + home.residents * (copy_s + tail_s))


def _steps(request: Request, tokens: int) -> int:
    return min(HORIZON_STEPS, request.limit - tokens)


def _pages(state: CoreState, request: Request) -> int:
    """That it takes by then."""
    tokens = _tokens(state, request)
    return (tokens + _steps(request, tokens)) // state.config.page_size + 1


def _tokens(state: CoreState, request: Request) -> int:
    """As far as the core knows: exact when it came, whole pages since."""
    return max(request.tokens, request.pages * state.config.page_size)


def _sealed(state: CoreState, request: Request) -> int:
    checkpoint = state.arena.checkpoints.get(request.req)
    return checkpoint.sealed if checkpoint is not None else 0
