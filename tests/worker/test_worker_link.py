"""The worker's end of its socket."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

import pytest

from lumenbox.wire import frames
from lumenbox.wire.stream import Splitter
from lumenbox.worker.link import CoordinatorGone, Link


class Crammed:
    """A socket whose kernel takes a part of a frame, and then has no memory for a while."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.calls = 0

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, data: memoryview) -> int:
        self.calls += 1
        if self.calls in (2, 3):
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
        return self._sock.send(data[:3] if self.calls == 1 else data)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_a_frame_that_the_kernel_has_no_memory_for_goes_on_where_it_stopped(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    crammed = Crammed(theirs)
    message = frames.Failed("a reason")
    Link(crammed).send(message)  # type: ignore[arg-type]
    assert (Splitter().feed(ours.recv(1 << 10)), crammed.calls) == ([frames.encode(message)], 4)


def test_a_coordinator_that_is_gone_is_told_apart(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    link = Link(theirs)
    ours.close()
    with pytest.raises(CoordinatorGone):
        link.send(frames.Failed("nobody hears it"))
    with pytest.raises(CoordinatorGone):
        link.receive(block=True)
