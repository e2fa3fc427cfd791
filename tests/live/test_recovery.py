"""Workers die, hang and slow down one way or another; the streams do not notice."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from live_boxes import Answer, Body, Box, Clients, Connection, is_alive, wait_until
from live_load import Load, assert_unchanged, chat

LONG = 300


@pytest.fixture(scope="module")
def long_answer(shared_box: Box) -> Answer:
    return shared_box.stream(chat(max_tokens=LONG))


def kill(pid: int, signum: int = signal.SIGKILL) -> None:
    os.kill(pid, signum)


def once(tokens: int, act: Callable[[], Any]) -> Callable[[Answer], None]:
    """Act when so many tokens have arrived."""
    left = [act]

    def see(answer: Answer) -> None:
        if left and sum(map(len, answer.pieces)) >= tokens:
            left.pop()()

    return see


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 33, 150])
def test_a_stream_outlives_its_worker_wherever_it_is_in_its_pages(box: Box, long_answer: Answer, tokens: int) -> None:
    answer = box.stream(chat(max_tokens=LONG), once(tokens, lambda: kill(box.busy()["pid"])))
    assert_unchanged([answer], [long_answer])


def test_two_deaths_in_one_stream(box: Box, long_answer: Answer) -> None:
    first, second = once(20, lambda: kill(box.busy()["pid"])), once(180, lambda: kill(box.busy()["pid"]))

    def see(answer: Answer) -> None:
        first(answer)
        second(answer)

    answer = box.stream(chat(max_tokens=LONG), see)
    assert_unchanged([answer], [long_answer])
    assert answer.recoveries == 2


def test_every_kind_of_request_goes_on_when_a_worker_dies(box: Box, bodies: list[Body], expected: list[Answer]) -> None:
    clients = Clients(box, bodies).flowing()
    kill(box.busy()["pid"])
    assert_unchanged(clients.join(), expected)


def test_all_workers_at_once(box: Box, bodies: list[Body], expected: list[Answer]) -> None:
    clients = Clients(box, bodies).flowing()
    for pid in box.pids():
        kill(pid)
    assert_unchanged(clients.join(), expected, interrupted=2)


@pytest.mark.parametrize("deaths", [1, 3])
def test_the_fork_server_takes_its_workers_with_it_and_all_come_back(
    box: Box, bodies: list[Body], expected: list[Answer], deaths: int
) -> None:
    """It may die again while it starts."""
    before, since = box.incarnations(), box.seq()
    clients = Clients(box, bodies).flowing()
    for number in range(deaths):
        wait_until(lambda dead=number: fork_servers_died(box, since) == dead, "the next fork server")
        kill(box.fork_server())
    assert_unchanged(clients.join(), expected, interrupted=2)
    box.whole()
    assert all(now > then for now, then in zip(box.incarnations(), before, strict=True))
    assert fork_servers_died(box, since) == deaths


def fork_servers_died(box: Box, since: int) -> int:
    return [event["kind"] for event in box.events(since)].count("fork_server_dead")


def test_who_asks_while_no_worker_serves_waits_for_the_next(
    box: Box, bodies: list[Body], expected: list[Answer]
) -> None:
    """No worker can be born before its fork server wakes up, so every request comes at such a moment."""
    asked = sum(body.get("n", 1) for body in bodies)
    server = box.fork_server()
    kill(server, signal.SIGSTOP)
    try:
        for pid in box.pids():
            kill(pid)
        wait_until(lambda: all(row["state"] != "ready" for row in box.state()["workers"]), "a box without a worker")
        clients = Clients(box, bodies)
        wait_until(lambda: box.load()["waiting"] == asked, f"{asked} requests that wait")
    finally:
        kill(server, signal.SIGCONT)
    assert_unchanged(clients.join(), expected, interrupted=0)


def test_a_storm_of_kills_wedges_nothing(box: Box, bodies: list[Body], expected: list[Answer]) -> None:
    """Workers die at whatever instruction they are, one soon after the other, sometimes all of them."""
    load = Load(box, bodies[:6], expected[:6]).running(box)
    chance = random.Random(1)
    for _ in range(16):
        pids = [pid for pid in box.pids() if pid is not None and is_alive(pid)]
        if pids:
            kill(chance.choice(pids))
        load.more(chance.randrange(2))
    load.end(interrupted=5)


def test_a_worker_that_dies_again_while_it_comes_back(box: Box, long_answer: Answer) -> None:
    """The second kill meets the new incarnation while it starts or re-attaches."""

    def twice() -> None:
        victim = box.busy()
        kill(victim["pid"])
        newborn = wait_until(
            lambda: (pid := box.worker(victim["id"])["pid"]) not in (None, victim["pid"]) and pid, "a new process"
        )
        kill(newborn)

    answer = box.stream(chat(max_tokens=LONG), once(40, twice))
    assert_unchanged([answer], [long_answer])


def test_clients_that_leave_during_a_recovery(box: Box, long_answer: Answer) -> None:
    leavers = [
        Connection(box.port, "POST", "/v1/chat/completions", chat(f"leaver {i}", 3000, stream=True)) for i in range(4)
    ]
    for leaver in leavers:
        assert leaver.head().status == 200

    def act() -> None:
        for pid in box.pids():
            kill(pid)
        for leaver in leavers:
            leaver.reset()

    answer = box.stream(chat(max_tokens=LONG), once(40, act))
    assert_unchanged([answer], [long_answer])


def test_a_frozen_worker_is_replaced_and_its_streams_go_on(box: Box, long_answer: Answer) -> None:
    victims: list[dict[str, Any]] = []

    def freeze() -> None:
        victims.append(box.busy())
        kill(victims[0]["pid"], signal.SIGSTOP)

    answer = box.stream(chat(max_tokens=LONG), once(20, freeze))
    assert_unchanged([answer], [long_answer])
    wait_until(lambda: not is_alive(victims[0]["pid"]), "the end of the frozen process")
    box.replaced(victims[0]["id"], victims[0]["incarnation"])
    assert box.report()["cause"] == "hang"


def test_workers_frozen_while_idle_are_found_when_work_comes(box: Box, long_answer: Answer) -> None:
    pids = box.pids()
    for pid in pids:
        kill(pid, signal.SIGSTOP)
    answers = Clients(box, [chat(max_tokens=LONG)] * 2).join()
    assert_unchanged(answers, [long_answer] * 2, interrupted=2)
    for pid in set(pids) & set(box.pids()):
        kill(pid, signal.SIGCONT)  # one may have had no work, and harmed nobody


def test_a_coordinator_that_slept_blames_nobody(box: Box, bodies: list[Body], expected: list[Answer]) -> None:
    before = box.incarnations()
    clients = Clients(box, [chat(f"beside {i}", 600) for i in range(4)] + bodies).flowing()
    box.signal(signal.SIGSTOP)
    try:
        pid = box.pid
        wait_until(lambda: read_state(pid) == "T", "a stopped coordinator")
        wait_until(clock(3.0), "three seconds asleep")
    finally:
        box.signal(signal.SIGCONT)
    answers = clients.join()
    assert_unchanged(answers[4:], expected, interrupted=0)
    assert all(answer.is_whole for answer in answers)
    assert box.incarnations() == before


def read_state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def clock(seconds: float) -> Callable[[], bool]:
    """True from `seconds` after the first look on: time itself is what such a test is about."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def test_a_comparison_that_proves_nothing_fails(box: Box, long_answer: Answer) -> None:
    """The control: a fault that misses, and answers that differ, must not pass as a recovery."""
    since = box.seq()
    kill_nobody = once(20, lambda: os.kill(os.getpid(), 0))
    answer = box.stream(chat(max_tokens=LONG), kill_nobody)
    with pytest.raises(AssertionError, match="nothing is proved"):
        assert_unchanged([answer], [long_answer])
    other = box.stream(chat(max_tokens=LONG, logit_bias={"101": 1}), once(20, lambda: kill(box.busy()["pid"])))
    with pytest.raises(AssertionError, match="token"):
        assert_unchanged([other], [long_answer])
    assert sum(event["kind"] == "recovery" for event in box.events(since)) == 1
