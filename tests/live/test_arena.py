"""KV checkpoints in real processes: lost devices, damaged pages, deaths in the middle of copying and loading."""

from __future__ import annotations

import re

import pytest
from live_boxes import Answer, Body, Box, Clients, running
from live_load import assert_unchanged, chat

LONG_PROMPT = "lamp stone river night paper garden train window cloud bread " * 40
COPY_POINTS = ("copy_begun", "copy_done", "slots_released")
RESTORE_POINTS = ("restore_begun", "page_restored", "restore_done")
TAIL = 16 + 512
"""A page and a prefill chunk: all that a restore may leave to be computed again."""


@pytest.fixture(scope="module")
def long_bodies() -> list[Body]:
    """Long contexts, greedy and sampled: what a lost device would cost most."""
    return [chat(f"{n} {LONG_PROMPT}", 160, temperature=n % 2, seed=n, logprobs=True, top_logprobs=1) for n in range(4)]


@pytest.fixture(scope="module")
def long_answers(shared_box: Box, long_bodies: list[Body]) -> list[Answer]:
    return [shared_box.stream(body) for body in long_bodies]


def faults(points: tuple[str, ...]) -> dict[str, str]:
    """One death for each incarnation, at the second passage of its point."""
    return {"LUMENBOX_FAULT": ",".join(f"die_at:{point}:2:{life}" for life, point in enumerate(points, 1))}


def rows(box: Box) -> list[dict[str, object]]:
    reports = [box.report(event["report"]) for event in box.events() if event["kind"] == "recovery"]
    return [row for report in reports for row in report["requests"]]


@pytest.mark.parametrize("recovery", ["fixed", "lumen", "box"])
def test_a_lost_device_costs_its_streams_a_restore(
    recovery: str, long_bodies: list[Body], long_answers: list[Answer]
) -> None:
    with running("--recovery", recovery) as box:
        clients = Clients(box, long_bodies).flowing(40)
        box.steer("chaos", kind="lose", worker=box.busy()["id"])
        assert_unchanged(clients.join(), long_answers)
        box.whole().idle()
        assert box.report()["cause"] == "device_lost"
        lost = rows(box)
        assert {row["way"] for row in lost} == {"restore"}
        assert all(int(str(row["recomputed_tokens"])) <= TAIL for row in lost)
        assert [worker["arena_pages"] for worker in box.state()["workers"]] == [0, 0]
        assert_told(box)


def assert_told(box: Box) -> None:
    """What was written and loaded is told of each holder, in the report and among the metrics, and is the same."""
    report, workers = box.report(), box.state()["workers"]
    assert report["checkpoint"]["coverage"] == 1.0
    assert all(row["holders"] for row in report["requests"])
    restored = [worker["restored_bytes"] for worker in workers]
    told_bytes = sum(box.report(event["report"])["restored_bytes"] for event in box.events() if "report" in event)
    assert sum(restored) == told_bytes >= report["restored_bytes"] > 0 and report["restore_bytes_s"] > 0
    assert sum(worker["sealed_bytes"] for worker in workers) >= report["restored_bytes"]
    (told,) = [event for event in box.events() if event["kind"] == "recovery"]
    assert told["ways"] == {"restore": len(report["requests"])} and told["checkpoint"] == report["checkpoint"]
    metrics = box.request("GET", "/metrics").body.decode()
    for worker, count in zip(workers, restored, strict=True):
        pattern = rf'lumenbox:holder_restored_bytes_total{{engine="{worker["id"]}",model_name="[^"]*"}} (\S+)'
        (figure,) = re.findall(pattern, metrics)
        assert float(figure) == count


def test_damaged_pages_are_not_used_and_leave_nothing_behind(
    long_bodies: list[Body], long_answers: list[Answer]
) -> None:
    with running("--recovery", "lumen") as box:
        clients = Clients(box, long_bodies).flowing(40)
        victim = box.busy()["id"]
        assert "damaged" in box.steer("chaos", kind="corrupt", worker=victim)["verified"]
        box.steer("chaos", kind="lose", worker=victim)
        assert_unchanged(clients.join(), long_answers)
        assert any(row["restored_tokens"] == 0 for row in rows(box))
        assert_unchanged([box.stream(body) for body in long_bodies], long_answers, interrupted=0)
        box.whole().idle()


def test_all_but_one_at_once_with_two_replicas(long_bodies: list[Body], long_answers: list[Answer]) -> None:
    with running("--recovery", "lumen", "--replicas", "2", workers=3) as box:
        clients = Clients(box, long_bodies).flowing(40)
        for worker in (0, 1):
            box.steer("chaos", kind="lose", worker=worker)
        assert_unchanged(clients.join(), long_answers)
        box.whole().idle()


@pytest.mark.parametrize("points", [COPY_POINTS, RESTORE_POINTS], ids=["copying", "loading"])
def test_a_death_in_the_middle(points: tuple[str, ...], long_bodies: list[Body], long_answers: list[Answer]) -> None:
    """In turn at each point, once in each life of both workers; loading begins with a device that is lost."""
    with running("--recovery", "lumen", env=faults(points)) as box:
        clients = Clients(box, long_bodies).flowing(3 if points is COPY_POINTS else 40)
        if points is RESTORE_POINTS:
            box.steer("chaos", kind="lose", worker=box.busy()["id"])
        assert_unchanged(clients.join(), long_answers)
        box.whole().idle()
        assert box.state()["counters"]["worker_deaths"] >= 2


def test_a_full_budget_only_costs_checkpoints(long_bodies: list[Body], long_answers: list[Answer]) -> None:
    with running("--recovery", "lumen", "--checkpoint-budget", "1M") as box:
        clients = Clients(box, long_bodies).flowing(40)
        assert all(worker["arena_pages"] <= worker["arena_budget_pages"] for worker in box.state()["workers"])
        box.steer("chaos", kind="lose", worker=box.busy()["id"])
        assert_unchanged(clients.join(), long_answers)
        box.whole().idle()
        evicted = [event for event in box.events() if event["kind"] == "checkpoint_evicted"]
        assert len(evicted) == box.state()["checkpoint"]["evictions"]
        assert all(event["holders"] and event["pages"] for event in evicted)


def test_a_drain_loads_the_pages_ahead(long_bodies: list[Body], long_answers: list[Answer]) -> None:
    with running("--recovery", "lumen") as box:
        clients = Clients(box, long_bodies).flowing(40)
        victim = box.busy()["id"]
        assert box.steer("drain", worker=victim)["state"] == "drained"
        assert_unchanged(clients.join(), long_answers)
        assert box.worker(victim)["running"] == 0
        report = box.report()
        assert report["cause"] == "drain" and report["requests"]
        for row in report["requests"]:
            assert (row["way"], row["from_worker"]) == ("migrate", victim) and row["to_worker"] != victim
            assert row["recomputed_tokens"] < 16 and row["stall_s"] is not None, "its pages went ahead"
        box.steer("resume", worker=victim)
        box.whole().idle()


def test_a_restart_sends_its_requests_ahead(long_bodies: list[Body], long_answers: list[Answer]) -> None:
    with running("--recovery", "box") as box:
        clients = Clients(box, long_bodies).flowing(40)
        box.steer("restart", worker=box.busy()["id"])
        assert_unchanged(clients.join(), long_answers)
        box.whole().idle()
        (event,) = [event for event in box.events() if event["kind"] == "recovery"]
        report = box.report(event["report"])
        assert report["cause"] == "restart" and report["respawn_s"] is not None
        assert any(row["way"] == "migrate" for row in report["requests"])


def test_a_worker_that_is_back_takes_its_share() -> None:
    """Once it has served something new; the streams that then move to it do not count that as a recovery."""
    bodies = [chat(f"{n} {LONG_PROMPT}", 600, temperature=0) for n in range(4)]
    with running("--recovery", "box") as box:
        expected = Clients(box, bodies).join()
        clients = Clients(box, bodies).flowing(40)
        victim = box.busy()
        box.steer("chaos", kind="lose", worker=victim["id"])
        box.replaced(victim["id"], victim["incarnation"])
        assert box.stream(chat("new", 20)).is_whole
        assert_unchanged(clients.join(), expected)
        moves = [event for event in box.events() if event["kind"] == "rebalance"]
        assert moves and box.report()["cause"] == "device_lost"
        for event in moves:
            assert event["ways"] == {"migrate": event["requests"]}
            assert any(row["stall_s"] is not None for row in box.report(event["report"])["requests"])
        box.idle()
