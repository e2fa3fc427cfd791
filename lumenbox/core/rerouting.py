"""Where interrupted requests go: the rules of `restart`, `fixed` and `lumen`, by name (DESIGN §7). For J see `box`."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import ceil

from lumenbox.core.events import Interrupted
from lumenbox.core.placement import fixed, loads
from lumenbox.core.state import Worker
from lumenbox.core.ways import Case, Plan, Routing, Way

# -- least loaded --------------------------------------------------------------------------------------------------


def least_loaded(case: Case, interrupted: list[Interrupted]) -> Plan:
    """Stop-and-Restart: each to the survivor with the least predicted wait, what it was given before included."""
    queues = _Queues(case)
    return {lost.req: queues.take(lost) for lost in interrupted}


class _Queues:
    """Predicted waits on the survivors (routing.predicted_wait_s), moved on by each request that is given to one.

    The terms that do not depend on the request are computed once: a plan looks at survivors × requests of them.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        model, self._size = case.state.model, case.state.config.page_size
        base, per_decode, self._per_token, per_context = model.rates
        self._queues: list[list[float]] = []
        for w in case.survivors:
            residents = len(w.requests)
            step_s = base + per_decode * (residents + 1) + per_context * w.context_tokens
            short_s = step_s / (residents or 1)  # per missing token of room
            token_s = self._per_token * w.slowness
            room = w.free_pages * self._size
            fixed_s = (base + step_s) * w.slowness + token_s * w.backlog_tokens
            self._queues.append([fixed_s, token_s, room - w.backlog_tokens, short_s * w.slowness])

    def take(self, lost: Interrupted) -> Way:
        """The way to the survivor with the least wait, which is longer from now on."""
        tokens = lost.tokens
        prefill = tokens - self._case.saved_tokens(lost.req)
        waits = [
            wait + per_token * prefill + (0.0 if tokens < room else per_missing * (tokens - room))
            for wait, per_token, room, per_missing in self._queues
        ]
        if not waits:
            return Way("hold")
        place = waits.index(min(waits))
        queue = self._queues[place]
        queue[0] += queue[1] * prefill
        queue[2] -= tokens
        return self._case.sent_to(lost.req, self._case.survivors[place].id)


# -- to the holder -------------------------------------------------------------------------------------------------


def holder(case: Case, interrupted: list[Interrupted]) -> Plan:
    """Fixed-Checkpointing: each to its holder; without a checkpoint too, to where the ring would have put it."""
    alive = {w.id: w for w in case.survivors}
    plan = {lost.req: _to_holder(case, lost.req, alive) for lost in interrupted}
    plan |= least_loaded(case, [lost for lost in interrupted if plan[lost.req].way == "hold"])
    return plan


def _to_holder(case: Case, req: int, alive: dict[int, Worker]) -> Way:
    heir = _alive_holder(case, req, alive)
    if heir is None and case.survivors and case.state.config.placement == "fixed":
        heir = fixed(case.state, case.dead.id, case.survivors, 0).id
    return Way("hold") if heir is None else case.sent_to(req, heir)


def _alive_holder(case: Case, req: int, alive: dict[int, Worker]) -> int | None:
    checkpoint = case.checkpoint(req)
    if checkpoint is None:
        return None
    return next((h for h in checkpoint.holders if h in alive), None)


# -- locality-aware ------------------------------------------------------------------------------------------------


def locality_aware(case: Case, interrupted: list[Interrupted]) -> Plan:
    """LUMEN's, by the rule that is configured."""
    return RULES[case.state.config.checkpoints.routing_rule](case, interrupted)


def by_threshold(case: Case, interrupted: list[Interrupted]) -> Plan:
    """To the holder if L(holder) <= theta or the saved prefix is longer than tau; else to the least loaded.

    L is the load estimate that is configured, as it was before the failure; the least loaded is by predicted wait.
    """
    config = case.state.config.checkpoints
    alive = {w.id: w for w in case.survivors}
    load = dict(zip(alive, loads(case.state, case.survivors), strict=True))
    plan: Plan = {}
    for lost in interrupted:
        heir = _alive_holder(case, lost.req, alive)
        near = heir is not None and (load[heir] <= config.theta or case.saved_tokens(lost.req) > config.tau)
        plan[lost.req] = case.sent_to(lost.req, heir) if heir is not None and near else Way("hold")
    plan |= least_loaded(case, [lost for lost in interrupted if plan[lost.req].way == "hold"])
    return plan


def by_mean(case: Case, interrupted: list[Interrupted]) -> Plan:
    """All to their holders; then, while a holder has more waiting + running + assigned requests than the mean, its
    request with the shortest saved prefix moves to the least loaded survivor.

    The mean is rounded up, or it could not be kept; the least loaded is by the same count. Requests without a living
    holder fill up the least loaded in the end.
    """
    if not case.survivors:
        return {lost.req: Way("hold") for lost in interrupted}
    alive = {w.id: w for w in case.survivors}
    given: dict[int, list[tuple[int, int]]] = {w: [] for w in alive}
    homeless: list[int] = []
    for lost in interrupted:
        heir = _alive_holder(case, lost.req, alive)
        if heir is None:
            homeless.append(lost.req)
        else:
            given[heir].append((case.saved_tokens(lost.req), lost.req))
    heirs = _balance(case, given, homeless)
    return {lost.req: case.sent_to(lost.req, heirs[lost.req]) for lost in interrupted}


def _balance(case: Case, given: dict[int, list[tuple[int, int]]], homeless: list[int]) -> dict[int, int]:
    """Holders above the mean shed their shortest prefixes; then all that have no heir go to the least loaded."""
    counts = {w.id: len(w.requests) + len(given[w.id]) for w in case.survivors}
    mean = ceil((sum(counts.values()) + len(homeless)) / len(counts))
    shed: list[tuple[int, int]] = []
    for heir, requests in given.items():
        requests.sort(reverse=True)
        while counts[heir] > mean and requests:
            shed.append(requests.pop())
            counts[heir] -= 1
    heirs = {req: heir for heir, requests in given.items() for _, req in requests}
    heap = [(count, heir) for heir, count in counts.items()]
    heapify(heap)
    for req in [req for _, req in sorted(shed)] + homeless:
        count, heir = heappop(heap)
        heirs[req] = heir
        heappush(heap, (count + 1, heir))
    return heirs


RULES: dict[str, Routing] = {"threshold": by_threshold, "mean": by_mean}
