"""Whose KV checkpoint makes room when a holder's budget is full: policies by name.

Each gives a rank; the lowest goes, but only before one that ranks higher: who asks for room ranks too.
"""

from __future__ import annotations

from collections.abc import Callable

from lumenbox.core.state import CoreState, KvCheckpoint, Request, RequestPhase

Rank = tuple[float, ...]
Policy = Callable[[Request, KvCheckpoint], Rank]


def shortest_prefix(request: Request, checkpoint: KvCheckpoint) -> Rank:
    """What is cheapest to compute again."""
    return (checkpoint.sealed,)


def lru(request: Request, checkpoint: KvCheckpoint) -> Rank:
    """What has not grown for longest."""
    return (checkpoint.grown_at,)


def priority(request: Request, checkpoint: KvCheckpoint) -> Rank:
    """The least important (priority's highest number), of these the shortest prefix."""
    return (-request.priority, checkpoint.sealed)


POLICIES: dict[str, Policy] = {"shortest_prefix": shortest_prefix, "lru": lru, "priority": priority}


def victim(state: CoreState, holder: int, asking: Request, checkpoint: KvCheckpoint) -> int | None:
    """The request on this holder's budget to evict for `asking`; None if it has to do without.

    Only requests that run are evicted: the others' pages are being loaded, or are about to be.
    """
    rank = POLICIES[state.config.checkpoints.eviction]
    best: tuple[Rank, int] | None = None
    for req in state.workers[holder].holds:
        if req != asking.req and _may_go(state, state.requests[req]):
            key = (rank(state.requests[req], state.arena.checkpoints[req]), req)
            if best is None or key < best:
                best = key
    return best[1] if best is not None and best[0] < rank(asking, checkpoint) else None


def _may_go(state: CoreState, request: Request) -> bool:
    if request.phase != RequestPhase.RUNNING or request.heir >= 0:
        return False
    return request.req not in state.workers[request.worker].restoring
