"""Both ends of the fork server's socket, each against a stand-in for the other."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lumenbox.coordinator import forkserver
from lumenbox.coordinator.forkserver import ForkServer, ForkServerGone
from lumenbox.errors import StartupError
from lumenbox.wire import frames
from lumenbox.worker import forkserver as worker_forkserver

# -- the fork server -------------------------------------------------------------------------------------------------


@pytest.fixture
def ordered() -> Iterator[tuple[worker_forkserver.ForkServer, socket.socket]]:
    """A fork server in this process, and the coordinator's end of its socket: orders are sent before it serves."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    old = signal.getsignal(signal.SIGCHLD)
    server = worker_forkserver.ForkServer(theirs)
    try:
        yield server, ours
    finally:
        os.close(signal.set_wakeup_fd(-1))
        os.close(server._wakeup)
        signal.signal(signal.SIGCHLD, old)
        ours.close()
        theirs.close()


@pytest.fixture
def sleeper() -> Iterator[int]:
    """A child of this process."""
    with subprocess.Popen(["sleep", "300"]) as process:
        yield process.pid
        process.kill()


def refuse(*_: Any) -> int:
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def order(sock: socket.socket, token: int) -> None:
    with open(os.devnull) as carried:
        socket.send_fds(sock, [frames.encode(frames.Fork(token, "worker"))], [carried.fileno()])


def answer(sock: socket.socket) -> tuple[Any, list[int]]:
    data, fds, _, _ = socket.recv_fds(sock, 1 << 16, 8)
    return msgspec.msgpack.decode(data, type=frames.FromForkServer), fds


def test_a_fork_that_fails_is_told_and_the_next_one_is_made(
    ordered: tuple[worker_forkserver.ForkServer, socket.socket], sleeper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, ours = ordered
    refused: list[int] = []

    def fork() -> int:
        if not refused:
            refused.append(1)
            refuse()
        return sleeper

    monkeypatch.setattr(os, "fork", fork)
    order(ours, 1)
    order(ours, 2)
    ours.shutdown(socket.SHUT_WR)
    before = descriptors()
    server.serve()
    assert answer(ours) == (frames.NotForked(1, os.strerror(errno.EAGAIN)), [])
    forked, (pidfd,) = answer(ours)
    assert forked == frames.Forked(2, sleeper)
    os.close(pidfd)
    assert descriptors() == before


def test_a_child_that_cannot_be_watched_is_no_child(
    ordered: tuple[worker_forkserver.ForkServer, socket.socket], sleeper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, ours = ordered
    monkeypatch.setattr(os, "fork", lambda: sleeper)
    monkeypatch.setattr(os, "pidfd_open", refuse)
    order(ours, 1)
    ours.shutdown(socket.SHUT_WR)
    server.serve()
    assert answer(ours) == (frames.NotForked(1, os.strerror(errno.EAGAIN)), [])
    with pytest.raises(ProcessLookupError):
        os.kill(sleeper, 0)


# -- the coordinator's end -------------------------------------------------------------------------------------------

STUB = """
import os, socket, sys
import msgspec
from lumenbox.wire import frames
sock = socket.socket(fileno=int(sys.argv[1]))
sock.send(frames.encode(frames.Warm(0.0)))
while data := sock.recv(1 << 16):
    token = msgspec.msgpack.decode(data, type=frames.Fork).token
    {answer}
"""
REFUSES = STUB.format(answer='sock.send(frames.encode(frames.NotForked(token, "no process is left")))')
HANGS = STUB.format(answer="pass")
FORKS = STUB.format(
    answer="socket.send_fds(sock, [frames.encode(frames.Forked(token, os.getpid()))], [os.pidfd_open(os.getpid())])"
)


@contextmanager
def serving(stub: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    """A stand-in for the fork server, attached to the running loop."""
    monkeypatch.setattr(forkserver, "COMMAND", (sys.executable, "-c", stub))
    server = ForkServer(Path("no-model"), {}, 2)
    server.attach()
    try:
        yield server
    finally:
        server.close()
        server.await_end(10)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_the_kernels_refusal_is_an_error_of_that_birth_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(REFUSES, monkeypatch) as server:
        for _ in range(2):
            with pytest.raises(StartupError, match="no process is left"):
                async with asyncio.timeout(10):
                    await server.fork("worker", [], {})
        assert server.alive


async def test_a_warm_server_that_does_not_answer_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "ANSWER_DEADLINE_S", 0.2, raising=False)
    dead: list[ForkServer] = []
    with serving(HANGS, monkeypatch) as server:
        server.on_death = dead.append
        with pytest.raises(ForkServerGone):
            async with asyncio.timeout(10):  # of the test, for a coordinator that would wait for ever
                await server.fork("worker", [], {})
        assert dead == [server] and not server.alive
        server.await_end(10)
        with pytest.raises(ProcessLookupError):
            os.kill(server.pid, 0)


async def test_a_fork_cancelled_in_the_turn_of_its_answer_leaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(FORKS, monkeypatch) as server:
        await server.warm
        before, take, came = descriptors(), server._take, []

        def take_and_cancel(message: Any, fds: list[int]) -> None:
            came.append(descriptors())
            take(message, fds)
            forking.cancel()

        monkeypatch.setattr(server, "_take", take_and_cancel)
        forking = asyncio.ensure_future(server.fork("worker", [], {}))
        with pytest.raises(asyncio.CancelledError):
            await forking
        assert came == [before + 1], "the answer brought a descriptor"
        assert descriptors() == before
