"""Where a request goes: the worker with the least predicted wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lumenbox.core.cost import FLOOR_S
from lumenbox.core.state import CoreState, Worker

SEAT_STEPS = 16
"""Steps that a request is taken to wait for each one too many on a worker that runs as many as it may."""
LEAST_PER_DECODE_S = 1e-6
"""However little a resident seems to cost: among equals the worker with the fewest is next."""


def _waits_with_room_s(state: CoreState, workers: Iterable[Worker], tokens: int) -> list[float]:
    """Seconds until a request of `tokens` tokens would have its first token, on each of `workers` if it had room there.

    Its own prefill and that of what waits before it, one decode step of everyone there. Plain arithmetic in one loop:
    every arrival looks at every worker.
    """
    base, per_decode, per_token, per_context = state.model.rates
    per_decode = max(per_decode, LEAST_PER_DECODE_S)
    two_steps = 2 * max(FLOOR_S, base) + per_decode + per_token * tokens
    return [
        (
            two_steps
            + per_decode * len(worker.requests)
            + per_context * worker.context_tokens
            + per_token * worker.backlog_tokens
        )
        * worker.slowness
        for worker in workers
    ]


def _has_room(state: CoreState, worker: Worker, tokens: int) -> bool:
    return (
        len(worker.requests) < state.config.max_num_seqs
        and worker.backlog_tokens + tokens < worker.free_pages * state.config.page_size
    )


def _wait_for_room_s(state: CoreState, worker: Worker, tokens: int) -> float:
    """Seconds in which the running ones give back what it lacks of pages and seats.

    A page each per `page_size` steps, as a coarse guess.
    """
    base, per_decode, _, per_context = state.model.rates
    size, residents, backlog = state.config.page_size, len(worker.requests), worker.backlog_tokens + tokens
    step_s = max(FLOOR_S, base) + max(per_decode, LEAST_PER_DECODE_S) * (residents + 1)
    step_s += per_context * worker.context_tokens
    missing = max(0, backlog // size + 1 - worker.free_pages)
    steps = missing * size / max(1, residents) + SEAT_STEPS * max(0, residents + 1 - state.config.max_num_seqs)
    return step_s * steps * worker.slowness


def predicted_wait_s(state: CoreState, worker: Worker, tokens: int) -> float:
    """Seconds until a request of `tokens` tokens would have its first token on this worker."""
    wait_s = _waits_with_room_s(state, (worker,), tokens)[0]
    return wait_s if _has_room(state, worker, tokens) else wait_s + _wait_for_room_s(state, worker, tokens)


def least_wait(state: CoreState, workers: Sequence[Worker], tokens: int) -> Worker | None:
    """The worker with the least predicted wait, the first of them."""
    if not workers:
        return None
    waits = _waits_with_room_s(state, workers, tokens)
    best = workers[waits.index(min(waits))]
    if _has_room(state, best, tokens):
        return best  # want of room makes no wait shorter
    return min(workers, key=lambda worker: predicted_wait_s(state, worker, tokens))
