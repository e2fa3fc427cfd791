"""The strategy `box`: one cost J for every (request, way, worker), assigned by regret; see `lanes` for J."""

from __future__ import annotations

from copy import copy

from lumenbox.core.events import Interrupted
from lumenbox.core.lanes import INFINITE, Job, Lane, heirs_lanes, job_of, price
from lumenbox.core.rerouting import by_mean, least_loaded
from lumenbox.core.ways import Case, Plan, Way


def by_cost(case: Case, interrupted: list[Interrupted]) -> Plan:
    """The cheapest of three plans: ours by regret, that of `restart`, that of `lumen`. So J is never above theirs."""
    jobs = {lost.req: job_of(case, lost) for lost in interrupted}
    plans = [_by_regret(case, jobs), restart(case, interrupted), by_mean(case, interrupted)]
    return min(plans, key=lambda plan: price(case, plan, jobs))


def restart(case: Case, interrupted: list[Interrupted]) -> Plan:
    """What Stop-and-Restart would do: nothing is restored."""
    plan = least_loaded(case, interrupted)
    return {req: Way("recompute", way.heir) if way.way == "restore" else way for req, way in plan.items()}


# -- by regret -----------------------------------------------------------------------------------------------------


def _by_regret(case: Case, jobs: dict[int, Job]) -> Plan:
    """Who would lose most by its second best choice chooses first; then work moves off the latest finisher."""
    board = _Board(case)
    regrets = sorted((-board.regret(job), job.req) for job in jobs.values())
    for _, req in regrets:
        board.choose(jobs[req])
    board.improve()
    return board.plan()


Given = list[tuple[Job, Way]]


class _Board:
    """Lanes, what was given to each, and what that costs there in the order in which it will be executed."""

    def __init__(self, case: Case) -> None:
        self._dead = case.dead.id
        self._empty = heirs_lanes(case)
        self._lanes = heirs_lanes(case)
        self._heirs = list(self._lanes)
        self._given: dict[int, Given] = {heir: [] for heir in self._heirs}
        self._apart: Plan = {}

    def regret(self, job: Job) -> float:
        """Second best J minus best, on the lanes as they are before anything is given away."""
        costs = [job.home, *self._costs(job)]
        best = min(costs)
        costs.remove(best)
        return min(costs, default=INFINITE) - best if best < INFINITE else 0.0

    def choose(self, job: Job) -> None:
        """Take the cheapest way on the lanes as they are now."""
        costs = self._costs(job)
        cheapest = min(costs, default=INFINITE)
        if cheapest < job.home:
            heir = self._heirs[costs.index(cheapest)]
            self._give(self._lanes[heir], heir, job)
        else:
            self._apart[job.req] = Way("reattach", self._dead) if job.home < INFINITE else Way("hold")

    def _costs(self, job: Job) -> list[float]:
        """J by lane: of restore where pages are sealed, else of recompute."""
        if job.saved:
            return [lane.restore(job) for lane in self._lanes.values()]
        return [lane.recompute(job) for lane in self._lanes.values()]

    def _give(self, lane: Lane, heir: int, job: Job) -> None:
        restores = job.saved > 0 and lane.restore(job) <= lane.recompute(job)
        lane.take(job, restores)
        self._given[heir].append((job, Way("restore" if restores else "recompute", heir)))

    # -- improvement ---------------------------------------------------------------------------------------------

    def improve(self) -> None:
        """While J falls, the last piece of the latest finisher goes to the heir that is free first."""
        costs = {heir: self._fill(heir, given)[0] for heir, given in self._given.items()}
        for _ in range(sum(map(len, self._given.values()))):
            late = max(self._heirs, key=lambda heir: self._lanes[heir].prefill_free)
            early = min(self._heirs, key=lambda heir: self._lanes[heir].prefill_free)
            if late == early or not self._given[late] or not self._move(late, early, costs):
                return

    def _move(self, late: int, early: int, costs: dict[int, float]) -> bool:
        """Whether moving one piece makes both together cheaper; then it is moved."""
        piece = max(self._given[late], key=_order)
        rest = [given for given in self._given[late] if given is not piece]
        more = [*self._given[early], (piece[0], Way(piece[1].way, early))]
        (cost_late, lane_late), (cost_early, lane_early) = self._fill(late, rest), self._fill(early, more)
        if cost_late + cost_early >= costs[late] + costs[early]:
            return False
        self._given[late], self._given[early] = rest, more
        costs[late], costs[early] = cost_late, cost_early
        self._lanes[late], self._lanes[early] = lane_late, lane_early
        return True

    def _fill(self, heir: int, given: Given) -> tuple[float, Lane]:
        """J of what an heir was given, in its order, and its lane after that."""
        lane, total = copy(self._empty[heir]), 0.0
        for job, way in sorted(given, key=_order):
            restores = way.way == "restore"
            total += lane.restore(job) if restores else lane.recompute(job)
            lane.take(job, restores)
        return total, lane

    def plan(self) -> Plan:
        """The ways, shortest first."""
        given = sorted((pair for given in self._given.values() for pair in given), key=_order)
        return self._apart | {job.req: way if way.heir >= 0 else Way("hold") for job, way in given}


def _order(given: tuple[Job, Way]) -> tuple[bool, int, int, int]:
    """Shortest restore first, then the shortest to compute again."""
    job, way = given
    restores = way.way == "restore"
    return not restores, job.saved if restores else 0, job.tail if restores else job.rest, job.req
