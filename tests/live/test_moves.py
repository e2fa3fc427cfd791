"""Drain, resume, restart, upgrade and chaos, by command line and under load: no stream breaks, none is refused."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from live_boxes import Answer, Body, Box, Clients, cli, is_alive, running, stat_fields, wait_until
from live_load import Load, assert_unchanged, chat


def steer(box: Box, *words: str) -> str:
    """A verb of the command line that must succeed."""
    done = cli(*words, "--run-dir", str(box.run_dir))
    assert done.returncode == 0, (words, done.returncode, done.stderr)
    return done.stdout


@pytest.fixture
def load(box: Box, bodies: list[Body], expected: list[Answer]) -> Load:
    return Load(box, bodies[:5], expected[:5]).running(box)


def test_drain_and_resume(box: Box, load: Load) -> None:
    victim = box.busy()
    assert steer(box, "drain", str(victim["id"])) == f"worker {victim['id']} drained\n"
    row = box.worker(victim["id"])
    assert (row["state"], row["running"], row["pid"]) == ("drained", 0, victim["pid"])
    check = cli("status", "--check", "--run-dir", str(box.run_dir))
    assert check.returncode == 4
    load.more(5)
    assert box.worker(victim["id"])["running"] == 0, "a drained worker gets no work"
    assert steer(box, "resume", str(victim["id"])) == f"worker {victim['id']} ready\n"
    wait_until(lambda: box.worker(victim["id"])["running"], "work for the resumed worker")
    load.end(interrupted=1)
    assert box.worker(victim["id"])["pid"] == victim["pid"]


def test_drain_of_the_only_serving_worker_finishes_what_runs(box: Box) -> None:
    """With nowhere to move to, its streams end on it; what comes then waits, and is served after the resume."""
    steer(box, "drain", "1")
    first = Clients(box, [chat(max_tokens=150)]).flowing()
    assert steer(box, "drain", "0") == "worker 0 drained\n"
    (finished,) = first.join()
    assert finished.is_whole and finished.recoveries == 0
    late = Clients(box, [chat(max_tokens=150)])
    wait_until(
        lambda: box.load()["waiting"] == 1 or box.request("GET", "/ready").status == 503, "a box without workers"
    )
    steer(box, "resume", "0")
    steer(box, "resume", "1")
    (answer,) = late.join()
    if answer.status == 200:
        assert answer.outcome == finished.outcome
    else:
        assert answer.status == 503, "either it waits or it is told to come again"


def test_restart(box: Box, load: Load) -> None:
    victim = box.busy()
    assert steer(box, "restart", str(victim["id"])) == f"worker {victim['id']} ready\n"
    row = box.worker(victim["id"])
    assert row["incarnation"] == victim["incarnation"] + 1 and row["pid"] != victim["pid"]
    assert box.report()["cause"] == "restart"
    load.end(interrupted=1)


def test_upgrade_with_another_environment(box: Box, load: Load) -> None:
    before, old_server = box.pids(), box.fork_server()
    since, fewest = box.seq(), []
    done = threading.Event()
    watch = threading.Thread(target=lambda: [fewest.append(ready(box)) for _ in iter(done.is_set, True)], daemon=True)
    watch.start()
    steer(box, "upgrade", "--env", "LUMENBOX_TEST_MARK=new", "--env", "OTHER=a=b")
    done.set()
    watch.join()
    load.end(interrupted=1)
    assert min(fewest) >= 1, "one slot after the other"
    assert not set(box.pids()) & set(before)
    for pid in (*box.pids(), box.fork_server()):
        environment = environ_of(box.fork_server() if pid not in box.pids() else pid)
        assert environment["LUMENBOX_TEST_MARK"] == "new" and environment["OTHER"] == "a=b"
    wait_until(lambda: not is_alive(old_server), "the end of the old fork server")
    reports = [box.report(e["report"]) for e in box.events(since) if e["kind"] == "recovery"]
    reports = [report for report in reports if report["cause"] != "hang"]  # of a worker that was starved meanwhile
    assert [(report["cause"], report["worker"]) for report in reports] == [("upgrade", 0), ("upgrade", 1)]
    assert any(row["way"] == "migrate" for report in reports for row in report["requests"]), "pages went ahead"


def ready(box: Box) -> int:
    return sum(row["state"] == "ready" for row in box.state()["workers"])


def environ_of(pid: int) -> dict[str, str]:
    """The environment a process was started with; a forked child shows its fork server's."""
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if pair)


@pytest.mark.parametrize("verb", ["drain", "restart", "upgrade"])
def test_a_worker_that_dies_while_it_is_moved(box: Box, load: Load, verb: str) -> None:
    """It is moved all the same, and the verb does not answer before."""
    victim = box.busy()
    words = (verb,) if verb == "upgrade" else (verb, str(victim["id"]))
    said: list[str] = []
    moving = threading.Thread(target=lambda: said.append(steer(box, *words)), daemon=True)
    moving.start()
    wait_until(lambda: struck(box), "the move")
    moving.join(120)
    assert not moving.is_alive(), "the verb hangs"
    ends = {"drain": f"worker {victim['id']} drained\n", "restart": f"worker {victim['id']} ready\n"}
    assert said == [ends.get(verb, "2 workers upgraded\n")]
    load.end(interrupted=1)
    if verb == "drain":
        wait_until(lambda: box.worker(victim["id"])["state"] == "drained", "a worker that is drained for good")
        steer(box, "resume", str(victim["id"]))


def struck(box: Box) -> bool:
    """Kill a worker that is on the move, if there is one and it has a process."""
    moved = next((row for row in box.state()["workers"] if row["state"] != "ready" and row["pid"]), None)
    try:
        return moved is not None and os.kill(moved["pid"], signal.SIGKILL) is None
    except ProcessLookupError:
        return False


def test_what_waits_is_served_by_a_worker_that_is_reborn_to_be_drained() -> None:
    """Nobody else could. The drain answers when that is done, not when the worker dies."""
    with running("--max-num-seqs", "1") as box:
        body = chat(max_tokens=400)
        wanted = box.stream(body)
        steer(box, "drain", "1")
        clients = Clients(box, [body] * 3)
        wait_until(
            lambda: box.worker(0)["running"] and box.worker(0)["waiting"] == 2, "one that runs and two that wait"
        )
        said: list[object] = []
        draining = threading.Thread(target=lambda: said.append(box.steer("drain", worker=0)), daemon=True)
        draining.start()
        row = wait_until(lambda: (row := box.worker(0))["state"] == "draining" and row, "the drain")
        assert row["waiting"]
        os.kill(row["pid"], signal.SIGKILL)
        assert_unchanged(clients.join(), [wanted] * 3)
        draining.join(120)
        assert said == [{"worker": 0, "state": "drained"}]
        assert [(row["state"], row["incarnation"]) for row in box.state()["workers"]] == [
            ("drained", 2),
            ("drained", 1),
        ]


def test_restart_brings_a_quarantined_worker_back(box: Box) -> None:
    steer(box, "restart", "1")  # a new life: deaths count until its first step
    for _ in range(3):
        pid = wait_until(lambda: (row := box.worker(1))["state"] == "ready" and row["pid"], "another life")
        os.kill(pid, signal.SIGSEGV)
        wait_until(lambda dead=pid: box.worker(1)["pid"] != dead, "its end")
    wait_until(lambda: box.worker(1)["state"] == "quarantined", "the quarantine")
    assert steer(box, "restart", "1") == "worker 1 ready\n"
    assert box.worker(1)["state"] == "ready"


# -- chaos -----------------------------------------------------------------------------------------------------------


def during(tokens: int, act: Callable[[], None]) -> Callable[[Answer], None]:
    left = [act]

    def see(answer: Answer) -> None:
        if left and len(answer.pieces) >= tokens:
            left.pop()()

    return see


@pytest.mark.parametrize(
    ("words", "verified", "cause"),
    [
        (("kill",), "exiting", "signal"),
        (("kill", "--signal", "SIGSEGV"), "exiting", "signal"),
        (("hang",), "stopped", "hang"),
    ],
)
def test_chaos_takes_hold_and_the_stream_goes_on(box: Box, words: tuple[str, ...], verified: str, cause: str) -> None:
    body = chat(max_tokens=400)
    wanted = box.stream(body)
    victims = []

    def act() -> None:
        victims.append(box.busy())
        kind, *rest = words
        said = steer(box, "chaos", kind, str(victims[0]["id"]), *rest)
        assert verified in said and str(victims[0]["pid"]) in said

    answer = box.stream(body, during(20, act))
    assert_unchanged([answer], [wanted])
    box.replaced(victims[0]["id"], victims[0]["incarnation"])
    assert box.report()["cause"] == cause
    assert {"kind": "chaos", "fault": words[0]}.items() <= [e for e in box.events() if e["kind"] == "chaos"][-1].items()


def test_chaos_hang_can_be_cleared_before_it_is_noticed(box: Box) -> None:
    """An idle worker is not missed, so there is time."""
    before = box.worker(1)
    assert "stopped" in steer(box, "chaos", "hang", "1")
    assert stat_fields(before["pid"])[0] == "T"
    assert "undisturbed" in steer(box, "chaos", "clear", "1")
    assert stat_fields(before["pid"])[0] in "RS"
    assert box.worker(1)["incarnation"] == before["incarnation"]


def test_a_worker_far_slower_than_its_peers_is_replaced(box: Box, bodies: list[Body], expected: list[Answer]) -> None:
    load = Load(box, [*bodies[:5], chat(max_tokens=200)], [*expected[:5], box.stream(chat(max_tokens=200))])
    load.running(box).more(3)
    victim = box.busy()
    assert "stretched 30 times" in steer(box, "chaos", "slow", str(victim["id"]), "--factor", "30")
    box.replaced(victim["id"], victim["incarnation"])
    load.end(interrupted=1)
    assert not is_alive(victim["pid"])
    causes = [box.report(e["report"])["cause"] for e in box.events() if e["kind"] == "recovery"]
    assert causes[-1] in ("slow", "hang")


def test_slow_can_be_cleared(box: Box) -> None:
    before = box.worker(0)
    steer(box, "chaos", "slow", "0", "--factor", "3")
    steer(box, "chaos", "clear", "0")
    assert box.worker(0)["incarnation"] == before["incarnation"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("drain", "7"), 1),
        (("resume", "0"), 1),
        (("chaos", "kill", "9"), 1),
        (("chaos", "slow", "0"), 2),
        (("chaos", "melt", "0"), 2),
        (("chaos", "slow", "0", "--factor", "0"), 2),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(box: Box, words: tuple[str, ...], code: int) -> None:
    done = cli(*words, "--run-dir", str(box.run_dir))
    assert done.returncode == code and not done.stdout
    assert "Traceback" not in done.stderr
    assert code == 2 or len(done.stderr.splitlines()) == 1


def test_slow_step_makes_a_worker_gray_from_the_start(expected: list[Answer], bodies: list[Body]) -> None:
    with running(env={"LUMENBOX_FAULT": "slow_step:1:8"}) as box:
        load = Load(box, bodies, expected).running(box)
        wait_until(lambda: box.worker(1)["incarnation"] > 1, "the end of the slow one")
        load.end(interrupted=1)


# -- reports ---------------------------------------------------------------------------------------------------------


def test_a_report_tells_the_whole_story(box: Box) -> None:
    body = chat(max_tokens=300)
    wanted, since = box.stream(body), box.seq()
    victim = []

    def act() -> None:
        victim.append(box.busy())
        os.kill(victim[0]["pid"], signal.SIGKILL)

    assert_unchanged([box.stream(body, during(50, act))], [wanted])
    box.whole()
    told = {event["kind"]: event for event in box.events(since)}
    assert {"worker_dead", "recovery", "worker_ready"} <= set(told)
    report = json.loads(steer(box, "report", str(told["recovery"]["report"]), "--json"))
    assert (report["worker"], report["incarnation"]) == (victim[0]["id"], victim[0]["incarnation"])
    assert report["cause"] == "signal" and report["strategy"] == "box"
    for name in ("detect_s", "fence_s", "plan_s", "first_token_s", "respawn_s", "recovered_s"):
        assert 0 <= report[name] < 60, name
    (row,) = report["requests"]
    assert row["way"] in ("reattach", "restore", "recompute") and row["from_worker"] == victim[0]["id"]
    assert row["to_worker"] in (0, 1) and row["tokens_before"] >= wanted.usage["prompt_tokens"] + 50
    assert 0 < row["stall_s"] < 60
    assert (report["lost_tokens"], report["duplicated_tokens"], report["failed_requests"]) == (0, 0, 0)
