"""Where a request goes: the worker with the least predicted wait."""

from __future__ import annotations

from collections.abc import Iterable

from lumenbox.core.cost import Shape
from lumenbox.core.state import CoreState, Worker

LARGEST_PACE = 4.0
"""A worker's slowness counts up to here: more is a matter of health, not of routing."""


def predicted_wait_s(state: CoreState, worker: Worker, tokens: int) -> float:
    """Seconds until a request of `tokens` tokens would have its first token on `worker`.

    Its own prefill and that of what waits before it, one decode step of everyone there, and, where pages are short,
    the time in which the running ones give enough back (a page each per `page_size` steps, as a coarse guess).
    """
    backlog = worker.backlog_tokens + tokens
    step_s = state.model.seconds(Shape(len(worker.requests) + 1, 0, worker.context_tokens))
    prefill_s = state.model.seconds(Shape(0, backlog, 0))
    page_size = state.config.page_size
    missing_pages = max(0, backlog // page_size + 1 - worker.free_pages)
    wait_s = prefill_s + step_s * (1 + missing_pages * page_size / max(1, len(worker.requests)))
    return wait_s * min(LARGEST_PACE, max(1.0, worker.pace))


def least_wait(state: CoreState, workers: Iterable[Worker], tokens: int) -> Worker | None:
    """The worker with the least predicted wait, then the fewest requests, then the lowest number."""
    return min(workers, key=lambda w: (predicted_wait_s(state, w, tokens), len(w.requests), w.id), default=None)
