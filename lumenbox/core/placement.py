"""Who holds a request's KV checkpoint: policies and load estimates by name (DESIGN §7).

A holder is whose budget carries the pages; the bytes lie in one arena that outlives every worker. So a holder that
dies takes nothing with it, and a box whose only serving worker is the request's own may let it be its own holder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lumenbox.core.state import CheckpointConfig, CoreState, Worker

# -- how loaded a worker is ----------------------------------------------------------------------------------------


def load_in_pages(state: CoreState, workers: Sequence[Worker]) -> list[float]:
    """L(w) = alpha * (pages held by w) + beta * (requests at w, waiting and running)."""
    alpha, beta = state.config.checkpoints.alpha, state.config.checkpoints.beta
    return [alpha * worker.held_pages + beta * len(worker.requests) for worker in workers]


def load_in_seconds(state: CoreState, workers: Sequence[Worker]) -> list[float]:
    """L(w) = wait_s(w) + lambda * restore_s(w), restore_s = reserved checkpoint bytes on w / bandwidth.

    wait_s is the time in its queue: the prefill of what w has not begun with. What w decodes is no queue; counted as
    one it would outweigh restore_s by far, and the holder with the shortest step would get every page.
    """
    per_token = state.model.rates[2]
    per_page = state.config.checkpoints.lam * state.config.checkpoints.page_bytes / state.restore_bytes_s
    return [per_token * worker.backlog_tokens + per_page * worker.held_pages for worker in workers]


LOADS: dict[str, Callable[[CoreState, Sequence[Worker]], list[float]]] = {
    "pages": load_in_pages,
    "seconds": load_in_seconds,
}


def loads(state: CoreState, workers: Sequence[Worker]) -> list[float]:
    """By the estimate that is configured."""
    return LOADS[state.config.checkpoints.load_estimate](state, workers)


# -- whom to choose; `candidates` are in order of their numbers and never empty ------------------------------------

Policy = Callable[[CoreState, int, Sequence[Worker], int], Worker]


def fixed(state: CoreState, serving: int, candidates: Sequence[Worker], room: int) -> Worker:
    """The next worker in the ring, whatever its load."""
    size = state.config.workers
    return min(candidates, key=lambda w: ((w.id - serving - 1) % size, w.id))


def load_aware(state: CoreState, serving: int, candidates: Sequence[Worker], room: int) -> Worker:
    """argmin over w of L(w), among those with room on their budgets if there are any."""
    limit = state.config.checkpoints.budget_pages - room
    best = least_loaded(state, candidates)
    if best.held_pages <= limit:
        return best
    roomy = [worker for worker in candidates if worker.held_pages <= limit]
    return least_loaded(state, roomy) if roomy else best


def least_loaded(state: CoreState, candidates: Sequence[Worker]) -> Worker:
    """argmin of L(w), ties by number."""
    estimates = loads(state, candidates)
    return candidates[estimates.index(min(estimates))]


POLICIES: dict[str, Policy] = {"fixed": fixed, "load-aware": load_aware}


def one_more(state: CoreState, alive: Sequence[Worker], serving: int, others: Sequence[int], room: int) -> int | None:
    """A holder beside `others`, with none of which it may fail together; apart from the serving worker if possible."""
    config = state.config.checkpoints
    candidates = [w for w in alive if w.id != serving]
    if others:
        taken = {domain(config, other) for other in others}
        candidates = [w for w in candidates if domain(config, w.id) not in taken]
    if config.failure_domains:
        apart = domain(config, serving)
        candidates = [w for w in candidates if domain(config, w.id) != apart] or candidates
    if candidates:
        return POLICIES[state.config.placement](state, serving, candidates, room).id
    return None if others else serving


def choose_holders(state: CoreState, alive: Sequence[Worker], serving: int) -> tuple[int, ...]:
    """One of those that are `alive` per replica, no two in one failure domain; fewer where there are not so many."""
    chosen: list[int] = []
    if state.config.placement != "none":
        for _ in range(state.config.checkpoints.replicas):
            holder = one_more(state, alive, serving, chosen, room=1)
            if holder is None:
                break
            chosen.append(holder)
    return tuple(chosen)


def domain(config: CheckpointConfig, worker: int) -> int:
    """A number that workers share which fail together."""
    for number, members in enumerate(config.failure_domains):
        if worker in members:
            return number
    return -1 - worker
