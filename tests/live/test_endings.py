"""How a box ends: killed, drained, cut short, together with its terminal, while it loads. Nothing is left, ever."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from contextlib import suppress

import pytest
from live_boxes import (
    DEADLINE_S,
    Box,
    Clients,
    Connection,
    cli,
    descendants,
    gone,
    is_alive,
    running,
    start,
    stat_fields,
    wait_until,
)
from live_load import chat

LONG = chat(max_tokens=300)
ENDLESS = chat(max_tokens=7000)


def test_sigkill_takes_every_child_along_and_does_not_hinder_the_next() -> None:
    with running() as box:
        Clients(box, [ENDLESS, ENDLESS]).flowing()
        pids = descendants(box.pid)
        assert len(pids) == 3
        box.signal(signal.SIGKILL)
        killed = time.monotonic()
        wait_until(lambda: gone(pids), "the end of every child")
        assert time.monotonic() - killed < 1.0 + 0.5 * load_per_core(), "within a second, on a machine that has one"
        assert box.ended() == -signal.SIGKILL
        assert cli("status", "--run-dir", str(box.run_dir)).returncode == 3
        with running(run_dir=box.run_dir, port=box.port) as again:
            assert again.stream(LONG).is_whole


def load_per_core() -> float:
    """Other work on this machine, in processes that want a core."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def test_sigterm_lets_streams_finish_and_takes_no_more() -> None:
    with running() as box:
        wanted = box.stream(LONG)
        clients = Clients(box, [LONG, LONG]).flowing()
        pids = descendants(box.pid)
        box.signal(signal.SIGTERM)
        wait_until(lambda: "draining" in box.log(), "the drain")
        assert_refused(box)
        answers = clients.join()
        assert [answer.outcome for answer in answers] == [wanted.outcome] * 2
        assert box.ended() == 0
        assert gone(pids)
        assert cli("status", "--run-dir", str(box.run_dir)).returncode == 3


def assert_refused(box: Box) -> None:
    """Draining: 503 with Retry-After everywhere, or nobody listens any more."""
    try:
        refused = box.request("POST", "/v1/chat/completions", LONG)
        health, live, ready = (box.request("GET", path) for path in ("/health", "/live", "/ready"))
    except (ConnectionError, TimeoutError):
        return
    assert refused.status == 503 and int(refused.headers["retry-after"]) >= 1
    assert refused.json["error"]["code"] == "draining"
    assert (health.status, live.status, ready.status) == (503, 200, 503)
    assert health.json["status"] == "draining"


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_cuts_the_drain_short(signum: int, code: int) -> None:
    with running(workers=1) as box:
        clients = Clients(box, [ENDLESS]).flowing()
        pids = descendants(box.pid)
        box.signal(signum)
        wait_until(lambda: "draining" in box.log(), "the drain")
        box.signal(signum)
        assert box.ended() == code
        assert_cut(clients)
        assert gone(pids)


def test_a_fork_server_that_never_comes_up_again_ends_the_box() -> None:
    """Three deaths in a row before one is warm; its streams are told."""
    with running() as box:
        clients = Clients(box, [ENDLESS]).flowing()

        def kill_what_starts() -> bool:
            for pid in descendants(box.pid):
                if stat_fields(pid)[1:2] == [str(box.pid)]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            return box.process.poll() is not None

        wait_until(kill_what_starts, "the end of the box")
        assert box.ended() == 1
        assert_cut(clients)
        assert "the fork server cannot start" in box.log()


def assert_cut(clients: Clients) -> None:
    """An error event, a closed body, no finish reason, no [DONE]."""
    for answer in clients.join():
        assert answer.error["code"] == "worker_lost" and answer.error["message"]
        assert answer.clean and not answer.done and not answer.finish


def test_the_drain_has_a_deadline() -> None:
    with running("--drain-timeout", "1", workers=1) as box:
        clients = Clients(box, [ENDLESS]).flowing()
        box.signal(signal.SIGTERM)
        assert box.ended() == 143
        assert_cut(clients)


def test_ctrl_c_in_a_terminal_is_one_drain() -> None:
    """The terminal signals the whole process group; the children do not take it for theirs."""
    with running() as box:
        wanted = box.stream(LONG)
        clients = Clients(box, [LONG, LONG]).flowing()
        os.killpg(box.pid, signal.SIGINT)
        answers = clients.join()
        assert [answer.outcome for answer in answers] == [wanted.outcome] * 2
        assert box.ended() == 0


def test_a_worker_that_dies_during_the_drain() -> None:
    with running() as box:
        wanted = box.stream(LONG)
        clients = Clients(box, [LONG, LONG]).flowing()
        box.signal(signal.SIGTERM)
        wait_until(lambda: "draining" in box.log(), "the drain")
        os.kill(box.busy()["pid"], signal.SIGKILL)
        answers = clients.join()
        assert [answer.outcome for answer in answers] == [wanted.outcome] * 2
        assert sum(answer.recoveries for answer in answers) >= 1
        assert box.ended() == 0


@pytest.mark.parametrize(
    ("signum", "stage"),
    [
        (signal.SIGINT, "fork server"),
        (signal.SIGTERM, "loading"),
        (signal.SIGINT, "workers"),
        (signal.SIGKILL, "loading"),
        (signal.SIGKILL, "workers"),
    ],
)
def test_a_signal_while_loading_leaves_no_process(signum: int, stage: str) -> None:
    box = Box()
    try:
        enough = {"fork server": 1, "loading": 2, "workers": 3}[stage]
        wait_until(lambda: len(descendants(box.pid)) >= enough or box.process.poll() is not None, stage)
        pids = descendants(box.pid)
        box.signal(signum)
        assert box.ended() in (-signum, 128 + signum), box.log()
        wait_until(lambda: gone(pids), "the end of every child", 10)
        assert "Traceback" not in box.log()
    finally:
        box.stop()


@pytest.mark.parametrize("how", [(), ("--now",)])
def test_down(how: tuple[str, ...]) -> None:
    with running() as box:
        clients = Clients(box, [ENDLESS if how else LONG]).flowing()
        pids = descendants(box.pid)
        done = cli("down", *how, "--run-dir", str(box.run_dir))
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert box.ended() == 0
        assert gone(pids)
        if how:
            assert_cut(clients)
        else:
            assert all(answer.is_whole for answer in clients.join())
        again = cli("down", "--run-dir", str(box.run_dir))
        assert again.returncode == 3 and "lumenbox up" in again.stderr


def test_down_now_does_not_wait_for_the_model_that_an_upgrade_loads() -> None:
    with running() as box:
        before = descendants(box.pid)
        command = [sys.executable, "-m", "lumenbox", "upgrade", "--run-dir", str(box.run_dir)]
        upgrade = start(command, box.run_dir / "upgrade.out", box.run_dir / "upgrade.err")
        loader = wait_until(lambda: loader_of(box, before), "the loader")
        os.kill(loader, signal.SIGSTOP)  # a model that takes long to read
        wait_until(lambda: stat_fields(loader)[0] == "T", "a stopped loader")
        pids = descendants(box.pid)
        assert len(pids) == len(before) + 2 and box.incarnations() == [1, 1], "it loads"
        assert cli("down", "--now", "--wait", "15", "--run-dir", str(box.run_dir)).returncode == 0
        assert box.ended() == 0 and gone(pids)
        assert upgrade.wait(DEADLINE_S) == 3 and "Traceback" not in box.log()


def loader_of(box: Box, before: set[int]) -> int:
    """The grandchild that was not there before, once it has its own log: by then it dies with its fork server."""
    new = descendants(box.pid) - before
    loaders = [pid for pid in new if int(stat_fields(pid)[1]) in new]
    return next((pid for pid in loaders if os.readlink(f"/proc/{pid}/fd/1").endswith("loader.log")), 0)


def test_down_that_outlasts_its_wait_says_so() -> None:
    with running(workers=1) as box:
        Clients(box, [ENDLESS]).flowing()
        assert cli("down", "--wait", "0.5", "--run-dir", str(box.run_dir)).returncode == 5
        assert is_alive(box.pid)
        assert cli("down", "--now", "--run-dir", str(box.run_dir)).returncode == 0


# -- clients that end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_leaves_frees_what_it_had(box: Box, streaming: bool) -> None:
    aborts = box.state()["counters"]["aborts"]
    connection = Connection(box.port, "POST", "/v1/chat/completions", {**ENDLESS, "stream": streaming})
    if streaming:
        assert connection.head().status == 200
    wait_until(lambda: box.load()["running"], "a running request")
    connection.reset()
    box.idle()
    generated = box.state()["counters"]["generated_tokens"]
    assert box.stream(chat(max_tokens=4)).is_whole
    assert box.state()["counters"]["generated_tokens"] == generated + 4, "nothing is computed for one who left"
    assert box.state()["counters"]["aborts"] == aborts + 1


def test_a_normal_end_is_no_abort(box: Box) -> None:
    before = box.state()["counters"]["aborts"]
    stopped = box.stream(chat(max_tokens=200, stop=["e", "a", "o"]))
    assert stopped.finish == {0: ["stop"]}
    for _ in range(4):
        assert box.stream(chat(max_tokens=4)).is_whole
    assert box.idle().state()["counters"]["aborts"] == before


def test_leavers_do_not_change_their_neighbours(box: Box) -> None:
    """Pages of those who leave are taken by those who stay; what was on its way to them must not land there."""
    wanted = box.stream(LONG)
    clients = Clients(box, [LONG] * 3).flowing()
    for number in range(24):
        leaver = Connection(
            box.port, "POST", "/v1/chat/completions", chat("noise " * (7 * number + 1), 200, stream=True)
        )
        parts = leaver.parts(leaver.head())
        for _ in range(number % 7):
            next(parts)
        leaver.reset()
    assert [answer.outcome for answer in clients.join()] == [wanted.outcome] * 3


def test_readers_that_do_not_read_are_no_burden(box: Box) -> None:
    lazy = []
    for _ in range(4):
        connection = Connection(box.port, "POST", "/v1/chat/completions", {**chat(max_tokens=1500), "stream": True})
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        lazy.append(connection)
    wait_until(lambda: box.load()["running"] == 4, "four running requests")
    assert box.stream(LONG).is_whole
    for connection in lazy:
        connection.reset()
    box.idle()
