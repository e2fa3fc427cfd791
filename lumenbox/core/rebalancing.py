"""Which running requests move to a worker that has come back, so that all of them decode faster.

A move pays if what it saves over the next steps is more than what it costs: the pause of the one that moves, and the
time in which its pages are loaded among the residents of its heir. All in stream-seconds, by the box's step model.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import msgspec

from lumenbox.core.cost import FIRST_OBSERVATIONS, Shape, StepModel
from lumenbox.core.lanes import HORIZON_TOKENS
from lumenbox.core.state import CoreState, Request, RequestPhase, Worker

MARGIN = 2.0
"""The pause is certain, the gain is an estimate: it must be so many times as large."""


class _Load(msgspec.Struct):
    """What a worker's steps are made of, and the requests that may leave it."""

    slowness: float
    residents: int
    context: int
    spare_pages: int
    movable: list[Request] = []

    def step_s(self, model: StepModel) -> float:
        return model.seconds(Shape(self.residents, 0, self.context)) * self.slowness

    def takes(self, state: CoreState, request: Request, sign: int) -> None:
        """It comes here (1), or leaves (-1)."""
        self.residents += sign
        self.context += sign * _tokens(state, request)
        self.spare_pages -= sign * _pages(state, request)

    def has_room(self, state: CoreState, request: Request) -> bool:
        return self.residents < state.config.max_num_seqs and _pages(state, request) <= self.spare_pages


def moves(state: CoreState, newcomer: Worker, others: Sequence[Worker]) -> list[Request]:
    """Requests of `others` to move to `newcomer`: of the slowest first, and of its requests what gains most."""
    if state.model.observed < FIRST_OBSERVATIONS:
        return []
    loads = _loads(state, [newcomer, *others])
    home, givers = loads[newcomer.id], [loads[worker.id] for worker in others if loads[worker.id].movable]
    for giver in givers:
        giver.movable.sort(key=lambda request: _gain_s(state, request, giver, home), reverse=True)
    slowest = [(-giver.step_s(state.model), number, giver) for number, giver in enumerate(givers)]
    heapify(slowest)
    chosen: list[Request] = []
    while slowest:
        _, number, giver = heappop(slowest)
        if giver.movable and _gain_s(state, giver.movable[0], giver, home) > 0:
            chosen.append(giver.movable.pop(0))
            giver.takes(state, chosen[-1], -1)
            home.takes(state, chosen[-1], 1)
            heappush(slowest, (-giver.step_s(state.model), number, giver))
    return chosen


def with_room(state: CoreState, heirs: dict[int, int]) -> dict[int, int]:
    """Of these moves (request, heir) those whose heir has a seat and the pages: elsewhere it would only wait."""
    loads = _loads(state, [state.workers[heir] for heir in set(heirs.values())])
    chosen: dict[int, int] = {}
    for req, heir in heirs.items():
        if loads[heir].has_room(state, state.requests[req]):
            loads[heir].takes(state, state.requests[req], 1)
            chosen[req] = heir
    return chosen


def _loads(state: CoreState, workers: Sequence[Worker]) -> dict[int, _Load]:
    """By number, with those that are on their way to a worker, without those that are on their way from it."""
    loads = {worker.id: _resident(state, worker) for worker in workers}
    for request in state.requests.values():
        if request.heir in loads:
            loads[request.heir].takes(state, request, 1)
    return loads


def _resident(state: CoreState, worker: Worker) -> _Load:
    """Of what it has now. Only what can be restored elsewhere may move: computing it again costs more than it saves."""
    load = _Load(worker.slowness, 0, 0, worker.free_pages)
    for req in worker.requests:
        request = state.requests[req]
        if request.is_moving:
            continue
        load.residents += 1
        load.context += _tokens(state, request)
        if request.phase == RequestPhase.RUNNING and state.num_sealed(req) and req not in worker.restoring:
            load.movable.append(request)
    return load


def _gain_s(state: CoreState, request: Request, giver: _Load, home: _Load) -> float:
    """Stream-seconds that its move saves, less what it costs."""
    if not home.has_room(state, request):
        return 0.0
    config, (_, per_decode, per_token, per_context) = state.config, state.model.rates
    tokens = _tokens(state, request)
    steps = _steps(request, tokens)
    its_s = per_decode + per_context * tokens
    before_s, after_s = giver.step_s(state.model), home.step_s(state.model) + its_s * home.slowness
    saved_s = steps * ((giver.residents - 1) * its_s * giver.slowness - home.residents * its_s * home.slowness)
    saved_s += steps * (before_s - after_s)
    tail_s = per_token * config.page_size * home.slowness
    copy_s = state.num_sealed(request.req) * config.checkpoints.page_bytes / state.restore_bytes_s
    return saved_s - MARGIN * (before_s + after_s + tail_s + home.residents * (copy_s + tail_s))


def _steps(request: Request, tokens: int) -> int:
    return min(HORIZON_TOKENS, request.limit - tokens)


def _pages(state: CoreState, request: Request) -> int:
    """That it takes by then."""
    tokens = _tokens(state, request)
    return (tokens + _steps(request, tokens)) // state.config.page_size + 1


def _tokens(state: CoreState, request: Request) -> int:
    """As far as the core knows: exact when it came, whole pages since."""
    return max(request.tokens, request.pages * state.config.page_size)
