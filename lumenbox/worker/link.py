"""A worker's socket: commands that wait are read between steps, frames are written whole."""

from __future__ import annotations

import errno
import select
import socket
import time

import msgspec

from lumenbox.wire import frames, stream

_decode = msgspec.msgpack.Decoder(frames.ToWorker).decode

NO_MEMORY_PAUSE_S = 0.001


class CoordinatorGone(Exception):
    """The other end closed: there is nobody left to work for."""


class Link:
    """The worker's end. Blocking writes: a frame is the commit record, so the step waits until it is in the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._splitter = stream.Splitter()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def receive(self, *, block: bool) -> list[frames.ToWorker]:
        """Every command that waits; with `block`, at least one."""
        commands: list[frames.ToWorker] = []
        while self._poll.poll(None if block and not commands else 0):
            data = self._sock.recv(1 << 20)
            if not data:
                raise CoordinatorGone
            commands += [_decode(message) for message in self._splitter.feed(data)]
        return commands

    def send(self, message: frames.FromWorker) -> None:
        """Write one frame; returns once it is wholly in the socket."""
        self.write(stream.pack(frames.encode(message)))

    def write(self, data: bytes) -> None:
        """Write bytes of a frame, however long the kernel has no memory for them."""
        left = memoryview(data)
        while left:
            try:
                left = left[self._sock.send(left) :]
            except (BrokenPipeError, ConnectionResetError):
                raise CoordinatorGone from None
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                time.sleep(NO_MEMORY_PAUSE_S)  # nobody tells when there is some again
