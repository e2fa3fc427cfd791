"""Reports of recoveries: moves that happen, that do not, and that another plan takes the place of."""

from __future__ import annotations

import time
from typing import Any

import pytest

from lumenbox.coordinator.figures import Figures, Meter
from lumenbox.coordinator.telling import Recoveries, Recovery
from lumenbox.core.commands import Planned


def planned(cause: str, *ways: tuple[int, str, int], worker: int = 0) -> Planned:
    return Planned(worker, 1, cause, "box", ways)


class Told:
    """A `Recoveries` that is told plans as the box tells them."""

    def __init__(self) -> None:
        self.figures = Figures()
        self.all = Recoveries(self.figures)

    def plan(self, plan: Planned, *, fenced: bool = False, tokens: int = 100) -> Recovery:
        report = (self.all.begun(plan) if fenced else None) or self.all.open(plan, {})
        if fenced:
            now = time.monotonic()
            report.fenced(now, now, now)
        report.planned(plan)
        for rid, way, heir in plan.ways:
            if way != "end":
                self.all.stays(rid)
                report.interrupted(rid, f"req-{rid}", way, heir, tokens, 0, [1])
        return report

    def draws(self, rid: int, worker: int) -> bool:
        return self.all.first_token(rid, worker, time.monotonic())


@pytest.fixture
def told() -> Told:
    return Told()


def rows(report: Recovery) -> list[dict[str, Any]]:
    return list(report.document["requests"])


def test_one_that_migrates_draws_on_until_it_has_left(told: Told) -> None:
    report = told.plan(planned("drain", (1, "migrate", 1)))
    assert told.draws(1, 0), "it is still where it was"
    told.all.moved(1, 130)
    told.all.restored(1, 128, 1000, 0.5)
    assert not told.draws(1, 1)
    (row,) = rows(report)
    assert (row["tokens_before"], row["restored_tokens"], row["recomputed_tokens"]) == (130, 128, 2)
    assert report.document["restore_bytes_s"] == 2000 and report.document["recovered_s"] is not None
    assert told.figures.tokens == {"restore": 128, "recompute": 2}
    assert told.figures.recoveries["migrate", "resumed"] == 1 and not told.figures.failures


def test_it_may_come_back_to_where_it_was(told: Told) -> None:
    report = told.plan(planned("drain", (1, "migrate", 1)))
    told.all.moved(1, 130)
    assert not told.draws(1, 0)
    assert rows(report)[0]["to_worker"] == 0 and report.document["recovered_s"] is not None


@pytest.mark.parametrize("end", ["stays", "gone"])
def test_one_that_never_left_was_not_interrupted(told: Told, end: str) -> None:
    report = told.plan(planned("drain", (1, "migrate", 1)))
    getattr(told.all, end)(1)
    assert rows(report) == [] and report.document["recovered_s"] is not None
    assert not told.figures.recoveries["migrate", "ended"] and not told.draws(1, 0)


def test_a_death_takes_the_place_of_a_move(told: Told) -> None:
    drain = told.plan(planned("drain", (1, "migrate", 1)))
    death = told.plan(planned("signal", (1, "restore", 2)), fenced=True)
    assert not told.draws(1, 2)
    assert (len(rows(drain)), len(rows(death))) == (0, 1)
    assert told.figures.recoveries == {("end", "ended"): 0, ("restore", "resumed"): 1}


def test_a_restart_has_one_report(told: Told) -> None:
    """What moved before, and what waited for the next life; asked twice, the later way counts."""
    report = told.plan(planned("restart", (1, "migrate", 1), (2, "migrate", 1)))
    report._failed -= 5.0  # seconds in which requests moved; the birth is counted from the death
    told.all.moved(1, 100)
    assert not told.draws(1, 1)
    assert told.plan(planned("restart", (2, "reattach", 0), (3, "end", -1)), fenced=True) is report
    assert not told.draws(2, 0)
    told.all.reborn(0)
    assert [(row["id"], row["way"]) for row in rows(report)] == [("req-1", "migrate"), ("req-2", "reattach")]
    assert report.document["failed_requests"] == 1 and report.document["respawn_s"] is not None
    assert told.figures.failures == {"restart": 1} and told.figures.respawn_s.counts[0] == 1


def test_a_birth_is_told_of_deaths_alone(told: Told) -> None:
    moved = told.plan(planned("rebalance", (1, "migrate", 1)))
    told.plan(planned("signal"), fenced=True)
    told.all.reborn(0)
    assert moved.document["respawn_s"] is None and sum(told.figures.respawn_s.counts) == 1


def test_moves_for_balance_are_no_recovery(told: Told) -> None:
    told.plan(planned("signal", (1, "restore", 1)), fenced=True)
    told.draws(1, 1)
    told.plan(planned("rebalance", (1, "migrate", 0), worker=1))
    told.all.moved(1, 120)
    told.draws(1, 0)
    last = told.all.find("last")
    assert last is not None and last["cause"] == "signal"
    assert told.figures.recoveries["migrate", "resumed"] == 0 and sum(told.figures.stall_s.counts) == 1
    second = told.all.find("2")
    assert second is not None and second["requests"][0]["stall_s"] is not None


def test_a_meter_tells_the_rate_of_the_last_second() -> None:
    meter = Meter()
    for tick in range(1000):
        meter.add(50, 100 + tick / 10)
    assert meter.total == 50_000
    assert meter.per_s(200.0) == pytest.approx(500, rel=0.06)
    assert meter.per_s(210.0) < 1
