"""Where a request goes: the worker with the least predicted wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lumenbox.core.cost import FLOOR_S
from lumenbox.core.state import CoreState, Worker

SEAT_STEPS = 16
"""Steps that a request is taken to wait for each one too many on a worker that runs as many as it may."""
LEAST_PER_DECODE_S = 1e-6
"""However little a resident seems to cost: among equals the worker with the fewest is next."""
LARGEST_PACE = 4.0
"""A worker's slowness counts up to here: more is a matter of health, not of routing."""


def predicted_waits_s(state: CoreState, workers: Iterable[Worker], tokens: int) -> list[float]:
    """Seconds until a request of `tokens` tokens would have its first token, on each of `workers`.

    Its own prefill and that of what waits before it, one decode step of everyone there, and, where pages or seats are
    short, the time in which the running ones give enough back (a page each per `page_size` steps, as a coarse guess).
    Plain arithmetic in one loop: every arrival and every placement looks at every worker.
    """
    base, per_decode, per_token, per_context = state.model.rates
    per_decode = max(per_decode, LEAST_PER_DECODE_S)
    size, seats = state.config.page_size, state.config.max_num_seqs
    two_steps = 2 * max(FLOOR_S, base) + per_decode + per_token * tokens
    return [
        (two_steps + per_decode * residents + per_context * worker.context_tokens + per_token * backlog)
        * (pace if pace > 1.0 else 1.0)
        if (residents := len(worker.requests)) < seats
        and (backlog := worker.backlog_tokens) + tokens < worker.free_pages * size
        and (pace := worker.pace) <= LARGEST_PACE
        else _burdened_wait_s(state, worker, tokens)
        for worker in workers
    ]


def _burdened_wait_s(state: CoreState, worker: Worker, tokens: int) -> float:
    """The same where pages or seats are short, or the worker is slow."""
    base, per_decode, per_token, per_context = state.model.rates
    per_decode = max(per_decode, LEAST_PER_DECODE_S)
    size, residents, backlog = state.config.page_size, len(worker.requests), worker.backlog_tokens + tokens
    step_s = max(FLOOR_S, base) + per_decode * (residents + 1) + per_context * worker.context_tokens
    missing = max(0, backlog // size + 1 - worker.free_pages)
    steps = 1 + missing * size / max(1, residents) + SEAT_STEPS * max(0, residents + 1 - state.config.max_num_seqs)
    wait_s = max(FLOOR_S, base) + per_token * backlog + step_s * steps
    return wait_s * min(LARGEST_PACE, max(1.0, worker.pace))


def predicted_wait_s(state: CoreState, worker: Worker, tokens: int) -> float:
    """The same for one worker."""
    return predicted_waits_s(state, (worker,), tokens)[0]


def least_wait(state: CoreState, workers: Sequence[Worker], tokens: int) -> Worker | None:
    """The worker with the least predicted wait, the first of them."""
    waits = predicted_waits_s(state, workers, tokens)
    return workers[waits.index(min(waits))] if waits else None
