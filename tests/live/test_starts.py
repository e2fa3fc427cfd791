"""Boxes that start badly, serve without a net, or meet a poisonous request."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live_boxes import (
    Answer,
    Body,
    Box,
    Clients,
    cli,
    descendants,
    gone,
    is_alive,
    running,
    runs_in,
    stat_fields,
    wait_until,
)
from live_load import assert_unchanged, chat

from lumenbox.models import cache

LONG = chat(max_tokens=300)
ENDLESS = chat(max_tokens=7000)


# -- refused at the start --------------------------------------------------------------------------------------------


def assert_refused(box: Box, *words: str) -> None:
    """Exit code 1, one line that names the cause, and nobody left."""
    try:
        pids: set[int] = set()
        wait_until(lambda: pids.update(descendants(box.pid)) or box.process.poll() is not None, "the end of `up`")
        assert box.ended() == 1, box.log()
        said = [line for line in box.log().splitlines() if line.startswith("lumenbox: ")]
        assert len(said) == 1 and box.log().splitlines()[-1] == said[0], box.log()
        assert all(word in said[0] for word in words), said
        assert "Traceback" not in box.log() and len(box.log().splitlines()) < 12
        assert box.out.read_bytes() == b""
        wait_until(lambda: gone(pids), "no process left", 10)
    finally:
        box.stop()


def test_a_run_directory_in_use(box: Box) -> None:
    pids = descendants(box.pid)
    out, err = box.out.read_bytes(), box.err.read_bytes()
    command = [sys.executable, "-m", "lumenbox", "up", "tiny-random", "--port", "0", "--run-dir", str(box.run_dir)]
    done = subprocess.run([*command, "--no-tui"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and not done.stdout
    assert len(done.stderr.splitlines()) == 1 and "lumenbox down" in done.stderr and str(box.run_dir) in done.stderr
    assert descendants(box.pid) == pids
    assert (box.out.read_bytes(), box.err.read_bytes()) == (out, err)


def test_a_port_that_is_taken(box: Box) -> None:
    assert_refused(Box(port=box.port), str(box.port))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--kv-cache-memory", "900GiB", "--max-num-seqs", "1000000"), ("MiB", "--kv-cache-memory")),
        (("--kv-cache-memory", "1k"), ("--kv-cache-memory",)),
        (("--devices", "cuda:0"), ("--devices",)),
    ],
)
def test_what_does_not_fit(flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    assert_refused(Box(*flags), *words)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    assert_refused(Box(model=str(tmp_path / "nowhere")), "nowhere")


Damage = Callable[[Path], None]


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def zero(folder: Path) -> None:
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (cut, "model.safetensors"),
        (zero, "model.safetensors"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: [f.unlink() for f in folder.glob("token*")], "tokenizer"),
        (lambda folder: shutil.rmtree(folder) or folder.mkdir(), "config.json"),
    ],
    ids=["cut", "zeroed", "config torn", "no config", "no tokenizer", "empty"],
)
def test_a_model_that_is_broken(shared_box: Box, tmp_path: Path, damage: Damage, word: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(cache.folder_of("tiny-random"), folder)
    damage(folder)
    assert_refused(Box(model=str(folder)), word)


def test_exact_mode_that_cannot_be_proved(shared_box: Box) -> None:
    assert_refused(Box("--exact", "on", "--page-size", "10"), "--exact on")


# -- while it loads --------------------------------------------------------------------------------------------------


def test_verbs_about_workers_are_refused_until_there_are_some() -> None:
    """The model cannot be loaded before the fork server wakes up, so every verb comes at such a moment."""
    box = Box()
    try:
        wait_until(lambda: runs_in(box.run_dir) or box.process.poll() is not None, "the control socket")
        server = box.fork_server()
        os.kill(server, signal.SIGSTOP)
        try:
            wait_until(lambda: stat_fields(server)[0] == "T", "a stopped fork server")
            assert descendants(server) == set(), "nothing is loaded yet"
            for words in (("restart", "0"), ("chaos", "kill", "1"), ("drain", "0"), ("upgrade",)):
                refused = cli(*words, "--run-dir", str(box.run_dir))
                assert (refused.returncode, refused.stdout) == (1, ""), words
                assert len(refused.stderr.splitlines()) == 1 and "loading" in refused.stderr
        finally:
            os.kill(server, signal.SIGCONT)
        box.ready()
        assert box.incarnations() == [1, 1]
        assert set(filter(is_alive, descendants(box.pid))) == {server, *box.pids()}
        assert box.stream(chat(max_tokens=8)).is_whole
    finally:
        box.stop()


# -- the restart budget ----------------------------------------------------------------------------------------------


def test_a_worker_that_never_comes_up_is_quarantined_while_the_other_serves() -> None:
    """The box is ready then, and ends like any other."""
    with running(env={"LUMENBOX_FAULT": "exit0_at_start:0"}) as box:
        assert " workers=1/2 " in box.out.read_text()
        state = box.state()
        assert [row["state"] for row in state["workers"]] == ["quarantined", "ready"]
        assert state["state"] == "degraded"
        assert box.request("GET", "/health").status == 200
        assert [e["worker"] for e in box.events() if e["kind"] == "quarantine"] == [0]
        assert [e["cause"] for e in box.events() if e["kind"] == "recovery"] == ["exit"] * 3
        clients = Clients(box, [LONG]).flowing()
        box.signal(signal.SIGTERM)
        (answer,) = clients.join()
        assert answer.is_whole and answer.recoveries == 0
        assert box.ended() == 0


def test_a_box_without_any_worker_ends() -> None:
    box = Box(env={"LUMENBOX_FAULT": "exit0_at_start:0,exit0_at_start:1"})
    try:
        assert box.ended() == 1
        last = box.log().splitlines()[-1]
        assert last.startswith("lumenbox: ") and "quarantined" in last
        assert box.log().count("lost (exit)") == box.log().count("lost (") == 6, "each is judged by its exit code"
        assert "Traceback" not in box.log()
    finally:
        box.stop()


# -- poison ----------------------------------------------------------------------------------------------------------


def test_a_poisonous_request_costs_two_deaths_and_no_bystander() -> None:
    with running(workers=3, env={"LUMENBOX_FAULT": "die_on_text:ZZPOISONZZ"}) as box:
        wanted = box.stream(LONG)
        clients = Clients(box, [LONG] * 3).flowing()
        reply = box.request("POST", "/v1/chat/completions", chat("a ZZPOISONZZ b", 4))
        assert reply.status == 500 and reply.json["error"]["code"] == "worker_died"
        answers = clients.join()
        ended = [answer for answer in answers if answer.error]
        assert len(ended) <= 1, "only a stream that shared both fatal steps may be taken for the culprit"
        assert all(answer.error["code"] == "worker_died" and answer.clean for answer in ended)
        assert all(answer.outcome == wanted.outcome for answer in answers if not answer.error)
        assert box.whole().state()["counters"]["worker_deaths"] == 2
        streamed = box.stream(chat("ZZPOISONZZ", 4))
        assert streamed.error["code"] == "worker_died" and streamed.clean and not streamed.done
        for _ in range(4):  # a worker each, and no other request that would speak for them
            reply = box.whole().request("POST", "/v1/chat/completions", chat("a ZZPOISONZZ b", 4))
            assert reply.status == 500 and reply.json["error"]["code"] == "worker_died"
            assert "quarantine" not in {event["kind"] for event in box.events()}
        assert box.whole().idle().stream(LONG).outcome == wanted.outcome


# -- without a net ---------------------------------------------------------------------------------------------------


def test_without_recovery_a_stream_ends_with_an_error_event() -> None:
    with running("--recovery", "none", "--no-respawn", workers=1) as box:
        clients = Clients(box, [ENDLESS, ENDLESS]).flowing()
        os.kill(box.pids()[0], signal.SIGKILL)
        for answer in clients.join():
            assert answer.error["code"] == "worker_lost" and answer.error["type"] == "server_error"
            assert answer.clean and not answer.done and not answer.finish and answer.usage is None
        assert box.worker(0)["state"] == "dead"
        refused = box.request("POST", "/v1/chat/completions", LONG)
        assert refused.status == 503 and refused.json["error"]["code"] == "no_worker"
        assert int(refused.headers["retry-after"]) >= 1


def test_dead_workers_stay_dead_if_so_told() -> None:
    with running("--no-respawn") as box:
        wanted = box.stream(LONG)
        clients = Clients(box, [LONG] * 2).flowing()
        first = box.busy()
        os.kill(first["pid"], signal.SIGKILL)
        assert_unchanged(clients.join(), [wanted] * 2)
        assert box.worker(first["id"])["state"] == "dead"
        assert box.request("GET", "/health").status == 200
        os.kill(box.worker(1 - first["id"])["pid"], signal.SIGKILL)
        wait_until(lambda: box.request("GET", "/health").status == 503, "a box that is not healthy")
        assert box.request("GET", "/health").json["status"] == "dead"
        assert box.request("GET", "/ready").status == 503
        assert box.request("GET", "/v1/models").status == box.request("GET", "/live").status == 200
        assert box.request("POST", "/v1/chat/completions", LONG).status == 503
        assert box.incarnations() == [2, 2] and set(box.pids()) == {None}
        assert box.steer("restart", worker=0) == {"worker": 0, "state": "ready"}
        assert box.stream(LONG).outcome == wanted.outcome


# -- a tight box -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tight() -> Iterator[Box]:
    """Few pages, few descriptors at first, and a log that is looked at."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    lower = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))  # noqa: E731
    with running("--kv-pages", "64", workers=1, preexec_fn=lower) as box:
        yield box


def test_what_can_never_fit_is_refused_and_bars_nobody(tight: Box) -> None:
    (model,) = tight.request("GET", "/v1/models").json["data"]
    assert model["max_model_len"] == 64 * 16
    refused = tight.request("POST", "/v1/chat/completions", chat("long " * 300, 4))
    assert refused.status == 400 and refused.json["error"]["code"] == "context_length_exceeded"
    grown = tight.stream(chat(max_tokens=5000))
    assert grown.finish == {0: ["length"]} and grown.usage["total_tokens"] == 64 * 16


def test_preemption_does_not_change_an_answer(tight: Box, bodies: list[Body], expected: list[Answer]) -> None:
    """Eight requests in a pool that holds five of them."""
    before = tight.state()["counters"]["preemptions"]
    answers = Clients(tight, bodies[:6] * 2).join()
    assert_unchanged(answers, expected[:6] * 2, interrupted=0)
    assert tight.state()["counters"]["preemptions"] > before
    tight.idle()


def test_more_connections_than_the_soft_limit(tight: Box) -> None:
    socks = [socket.create_connection(("127.0.0.1", tight.port)) for _ in range(300)]
    try:
        for sock in socks:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: box\r\n")
        assert [tight.request("GET", "/health").status for _ in range(10)] == [200] * 10
    finally:
        for sock in socks:
            sock.close()
    assert tight.stream(chat(max_tokens=8)).is_whole


def test_the_log_is_short_plain_and_holds_no_prompt(tight: Box) -> None:
    before = len(tight.log())
    for number in range(100):
        body = b"{" if number % 2 else chat("canary-4711", 4, temperature=-5)
        assert tight.request("POST", "/v1/chat/completions", body).status == 400
    assert tight.stream(chat("canary-4711", 8)).is_whole
    os.kill(tight.pids()[0], signal.SIGKILL)
    tight.whole()
    said = tight.log()[before:]
    assert len(said) < 100 * 250 and "Traceback" not in said
    everything = b"".join(path.read_bytes() for path in tight.run_dir.rglob("*") if path.is_file())
    assert b"canary" not in everything
    assert "\x1b" not in tight.log() and "\r" not in tight.log()


def test_streams_are_not_frozen_by_a_long_prompt(shared_box: Box) -> None:
    """A prompt of many chunks runs beside a stream: the stream gets a token with each chunk."""
    clients = Clients(shared_box, [chat(f"beside {i}", 2000) for i in range(2)]).flowing()
    before = list(clients.tokens)
    reply = shared_box.request("POST", "/v1/chat/completions", chat("filler " * 900, 1))
    assert reply.status == 200 and reply.json["usage"]["prompt_tokens"] > 4000
    assert all(now - then >= 4 for now, then in zip(clients.tokens, before, strict=True))
    clients.join()
