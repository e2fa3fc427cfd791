"""One incarnation as the coordinator holds it. The process here is this one: it is looked at, never signalled."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from lumenbox.coordinator.forkserver import Child
from lumenbox.coordinator.link import WorkerLink, socket_pair
from lumenbox.memory.status import PAGE_BYTES, Phase, StatusWriter
from lumenbox.wire import frames
from lumenbox.wire.stream import Splitter, pack


@pytest.fixture
def page() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, PAGE_BYTES) as page:
        yield page


@asynccontextmanager
async def linked(
    page: mmap.mmap, heard: asyncio.Queue[Any] | None = None
) -> AsyncIterator[tuple[WorkerLink, socket.socket]]:
    """A link, and the worker's end of its socket. What it says goes to `heard`: frames, and the evidence of its end."""
    ours, theirs = socket_pair()
    child = Child(os.getpid(), os.pidfd_open(os.getpid()), asyncio.get_running_loop().create_future())
    heard = heard or asyncio.Queue()
    link = WorkerLink(0, 1, ours, page, child, lambda _, m: heard.put_nowait(m), lambda _, e: heard.put_nowait(e))
    try:
        yield link, theirs
    finally:
        theirs.close()
        link.close()


def test_a_worker_that_stopped_while_it_wrote_its_status_is_judged_by_what_it_said_before(page: mmap.mmap) -> None:
    async def look() -> None:
        async with linked(page) as (link, _):
            writer = StatusWriter(page, tid=7)
            writer.write(Phase.COMPUTE, 3, 1000, 10, (2, 0, 64))
            before = link.status()
            assert before is not None and (before.phase, before.step, before.since_ns) == (Phase.COMPUTE, 3, 1000)
            struct.pack_into("<Q", page, 0, 3)  # odd: begun, and never ended
            struct.pack_into("<Q", page, 8, Phase.SEND)
            assert link.status() == before
            writer.write(Phase.IDLE, 4, 2000, 10)
            after = link.status()
            assert after is not None and after.phase == Phase.IDLE

    asyncio.run(look())


def test_what_one_turn_of_the_loop_sends_arrives_in_order(page: mmap.mmap) -> None:
    async def talk() -> None:
        async with linked(page) as (link, theirs):
            theirs.setblocking(False)
            for rid in range(3):
                link.send(frames.Cancel(rid, 0))
            with pytest.raises(BlockingIOError):
                theirs.recv(1)
            await asyncio.sleep(0)
            messages = Splitter().feed(theirs.recv(1 << 16))
            assert messages == [frames.encode(frames.Cancel(rid, 0)) for rid in range(3)]

    asyncio.run(talk())


class Crammed:
    """A socket whose kernel has no memory for the first thing that is sent."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.refused = 0

    def send(self, data: bytearray) -> int:
        if not self.refused:
            self.refused += 1
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
        return self._sock.send(data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)


def test_what_the_kernel_has_no_memory_for_is_sent_when_it_has(
    page: mmap.mmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def talk() -> None:
        async with linked(page) as (link, theirs):
            crammed = Crammed(link._sock)
            monkeypatch.setattr(link, "_sock", crammed)
            theirs.setblocking(False)
            link.send(frames.Cancel(1, 0))
            data = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(theirs, 1 << 16), 10)
            assert (crammed.refused, Splitter().feed(data)) == (1, [frames.encode(frames.Cancel(1, 0))])

    asyncio.run(talk())


def test_nothing_counts_behind_garbage_not_even_what_is_read_after_the_fence(page: mmap.mmap) -> None:
    async def talk() -> None:
        heard: asyncio.Queue[Any] = asyncio.Queue()
        async with linked(page, heard) as (link, theirs):
            theirs.sendall(frame("before") + pack(b"\xc1") + frame("behind"))
            async with asyncio.timeout(10):
                assert [await heard.get(), await heard.get()] == [frames.Failed("before"), "garbage"]
            theirs.sendall(frame("later"))
            link.read_out()
            assert frames.Failed("later") not in [heard.get_nowait() for _ in range(heard.qsize())]
            assert link._sock.recv(1 << 16) == frame("later"), "it had arrived"

    asyncio.run(talk())


def test_garbage_ends_what_is_read_after_the_fence(page: mmap.mmap) -> None:
    async def talk() -> None:
        heard: asyncio.Queue[Any] = asyncio.Queue()
        async with linked(page, heard) as (link, theirs):
            theirs.sendall(frame("before") + pack(b"\xc1") + frame("behind"))
            link.read_out()
            theirs.sendall(frame("later"))
            link.read_out()
            assert [heard.get_nowait() for _ in range(heard.qsize())] == [frames.Failed("before"), "garbage"]

    asyncio.run(talk())


def frame(reason: str) -> bytes:
    return pack(frames.encode(frames.Failed(reason)))


def test_a_worker_that_hears_nothing_any_more_leaves_no_writer(
    page: mmap.mmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that stayed would be called in every turn of the loop."""

    async def talk() -> None:
        async with linked(page) as (link, theirs):
            crammed = Crammed(link._sock)
            monkeypatch.setattr(link, "_sock", crammed)
            theirs.close()
            link.send(frames.Cancel(1, 0))
            async with asyncio.timeout(10):
                while link._outgoing:
                    await asyncio.sleep(0)
            assert crammed.refused == 1, "a writer was registered"
            assert not asyncio.get_running_loop().remove_writer(crammed.fileno())

    asyncio.run(talk())
