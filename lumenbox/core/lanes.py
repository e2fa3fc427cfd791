"""What a way back costs: J of DESIGN §7, on lanes that fill up as requests are given to them.

    restore(w)   = max(prefill lane free, copy lane free + sealed bytes / bw) + prefill(tail | sealed) + step
    recompute(w) = prefill lane free + prefill(rest) + step
    reattach     = remaining birth-to-first-step + step
    J            = weight * t + seconds that the residents of w lose + LATE_WEIGHT * max(0, t - SLACK_S)

Where an heir is short of pages, t grows by the time in which its residents give enough back: this is the worker's own
queue, and the `hold` of DESIGN §7. The way `hold` here waits for the next incarnation of the dead worker, which comes
with empty lanes after its birth.
"""

from __future__ import annotations

import msgspec

from lumenbox.core.events import Interrupted
from lumenbox.core.state import Worker
from lumenbox.core.ways import Case, Plan

SLACK_S = 1.0
LATE_WEIGHT = 1.0
"""What a client pays for each second of silence beyond SLACK_S, on top."""
HORIZON_TOKENS = 256
"""Tokens that a request may still draw for which an heir should have pages now."""
KEPT_FREE = 0.02
INFINITE = float("inf")


class Job(msgspec.Struct):
    """One interrupted request. `tail` is what a restore leaves to prefill, `rest` what a recompute does.

    `home` is J of a re-attach.
    """

    req: int
    rest: int
    tail: int
    saved: int
    copy_s: float
    pages: int
    weight: float
    home: float = INFINITE

    def cost(self, t: float) -> float:
        """J of a first token after `t` seconds, the residents' loss apart."""
        return self.weight * t + LATE_WEIGHT * max(0.0, t - SLACK_S)


def job_of(case: Case, lost: Interrupted) -> Job:
    """What is to be done for a request; tokens that it may still draw count towards the pages that it needs."""
    request, config = case.state.requests.get(lost.req), case.state.config
    left, weight = 0, 1.0
    if request is not None:
        left = min(HORIZON_TOKENS, max(0, request.limit - lost.tokens))
        weight = 1.0 / (1 + max(0, request.priority))
    saved = case.saved_tokens(lost.req)
    copy_s = saved // config.page_size * config.checkpoints.page_bytes / case.state.restore_bytes_s
    pages = -(-(lost.tokens + left) // config.page_size)
    job = Job(lost.req, lost.tokens, max(1, lost.tokens - saved), saved, copy_s, pages, weight)
    if case.can_reattach and lost.computed:
        job.home = job.cost(case.reattach_s(lost))
    return job


class Lane(msgspec.Struct):
    """An heir's two lanes. Costs are of the request that would come next; `take` gives it one.

    `spare` pages are free beyond one for each resident and 2 %; `page_s` is how long a missing one takes to come free.
    """

    start_s: float
    token_s: float
    page_s: float
    prefill_free: float
    copy_free: float
    residents: int
    spare: int

    def restore(self, job: Job) -> float:
        """J of restoring it here."""
        ready = self.copy_free + job.copy_s
        if ready < self.prefill_free:  # noqa: PLR1730 (a call costs more than the comparison)
            ready = self.prefill_free
        prefill_s = self.token_s * job.tail
        t = ready + self.start_s + prefill_s
        if job.pages > self.spare:
            t += self.page_s * (job.pages - self.spare)
        cost = job.weight * t + self.residents * prefill_s
        return cost + LATE_WEIGHT * (t - SLACK_S) if t > SLACK_S else cost

    def recompute(self, job: Job) -> float:
        """J of computing it again here."""
        prefill_s = self.token_s * job.rest
        t = self.prefill_free + self.start_s + prefill_s
        if job.pages > self.spare:
            t += self.page_s * (job.pages - self.spare)
        cost = job.weight * t + self.residents * prefill_s
        return cost + LATE_WEIGHT * (t - SLACK_S) if t > SLACK_S else cost

    def take(self, job: Job, restores: bool) -> None:
        """It comes here: the lanes are busy longer."""
        if restores:
            self.copy_free += job.copy_s
            self.prefill_free = max(self.prefill_free, self.copy_free) + self.token_s * job.tail
        else:
            self.prefill_free += self.token_s * job.rest
        self.residents += 1
        self.spare -= job.pages


def lane_of(case: Case, worker: Worker, free_s: float = 0.0) -> Lane:
    """A worker's lanes before anything is given to it; none is free before `free_s`."""
    base, per_decode, per_token, per_context = case.state.model.rates
    residents, size = len(worker.requests), case.state.config.page_size
    step_s = base + per_decode * (residents + 1) + per_context * worker.context_tokens
    return Lane(
        start_s=(base + step_s) * worker.slowness,
        token_s=per_token * worker.slowness,
        page_s=step_s * worker.slowness * size / max(1, residents),
        prefill_free=free_s + per_token * worker.slowness * worker.backlog_tokens,
        copy_free=free_s,
        residents=residents,
        spare=worker.free_pages - worker.backlog_tokens // size - residents - int(KEPT_FREE * worker.pages),
    )


def heirs_lanes(case: Case) -> dict[int, Lane]:
    """A lane for each survivor, and as -1 that of the next incarnation, if it comes with an empty pool."""
    lanes = {worker.id: lane_of(case, worker) for worker in case.survivors}
    if case.rebirth_s < INFINITE and not case.can_reattach:
        newborn = Worker(case.dead.id, pages=case.dead.pages, free_pages=case.dead.pages)
        lanes[-1] = lane_of(case, newborn, case.rebirth_s)
    return lanes


def price(case: Case, plan: Plan, jobs: dict[int, Job]) -> float:
    """The sum of J over a plan, each heir executing its part in the order of `recovery.in_order`."""
    lanes = heirs_lanes(case)
    total = 0.0
    for req, way in sorted(
        plan.items(), key=lambda item: jobs[item[0]].saved if item[1].way == "restore" else INFINITE
    ):
        job = jobs[req]
        if way.way == "reattach":
            total += job.home
            continue
        lane = lanes.get(way.heir)
        if lane is None:
            return INFINITE
        restores = way.way == "restore" or (way.way == "hold" and job.saved > 0)
        total += lane.restore(job) if restores else lane.recompute(job)
        lane.take(job, restores)
    return total
