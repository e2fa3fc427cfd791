"""One incarnation of a worker as the coordinator holds it: socket, pidfd, status page. Owner of all three."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from lumenbox.coordinator.forkserver import Child
from lumenbox.memory import proc, status
from lumenbox.wire import frames, stream

if TYPE_CHECKING:
    from lumenbox.coordinator.monitor import Suspicion

_decode = msgspec.msgpack.Decoder(frames.FromWorker).decode
_READ_BYTES = 1 << 18
_SOCKET_BUFFER = 4 << 20


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """(ours, the worker's), with large buffers: a frame should not wait for a coordinator that is busy."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
    ours.setblocking(False)
    return ours, theirs


class WorkerLink:
    """Reads whole frames, writes commands without ever blocking, and notices the end by pidfd, EOF or garbage."""

    def __init__(
        self,
        worker: int,
        incarnation: int,
        sock: socket.socket,
        page: mmap.mmap,
        child: Child,
        on_frame: Callable[[WorkerLink, frames.FromWorker], None],
        on_exit: Callable[[WorkerLink, str], None],
    ) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.child = child
        self.ready = False
        self.failure = ""
        self.disturbed = ""
        """What chaos or an operator did to it: such a death is no evidence against anyone."""
        self.disturbed_at: float | None = None
        self.suspicion: Suspicion | None = None
        """The monitor's: what it found when it last saw the worker late."""
        self.born = self.last_assign = self.last_heard = time.monotonic()
        self._sock = sock
        self._page = page
        self._status: status.Status | None = None
        self._splitter = stream.Splitter()
        self._outgoing = bytearray()
        self._on_frame, self._on_exit = on_frame, on_exit
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[None] = self._loop.create_future()
        self.is_garbled = False
        """It has sent what is no frame. Nothing is known of it and of its pool from then on."""
        self._closed = False
        self._stat_file = os.open(f"/proc/{child.pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        self._loop.add_reader(sock.fileno(), self._read)
        self._loop.add_reader(child.pidfd, self._pidfd_ready)

    @property
    def pid(self) -> int:
        return self.child.pid

    # -- talking -------------------------------------------------------------------------------------------------

    def send(self, command: frames.ToWorker) -> None:
        """Queue a command; all that one turn of the event loop queues goes out together, as the socket takes it."""
        if isinstance(command, frames.Assign):
            self.last_assign = time.monotonic()
        was_empty = not self._outgoing
        self._outgoing += stream.pack(frames.encode(command))
        if was_empty:
            self._loop.call_soon(self._write)

    def _write(self) -> None:
        if self._closed:
            return
        try:
            sent = self._sock.send(self._outgoing)
        except (BrokenPipeError, ConnectionResetError):
            sent = len(self._outgoing)  # its death is noticed by other means
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ENOBUFS):
                raise
            sent = 0
        del self._outgoing[:sent]
        if self._outgoing:
            self._loop.add_writer(self._sock.fileno(), self._write)
        else:
            self._loop.remove_writer(self._sock.fileno())

    def _read(self) -> None:
        if self._receive() == "eof":
            self._loop.remove_reader(self._sock.fileno())
            self._on_exit(self, "eof")

    def _receive(self) -> str:
        """Take what is in the socket once: `more`, `empty` or `eof`. Nothing counts that comes behind garbage."""
        if self.is_garbled:
            return "eof"
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return "empty"
        except ConnectionResetError:
            return "eof"
        if not data:
            return "eof"
        self.last_heard = time.monotonic()
        whole: list[frames.FromWorker] = []
        try:
            while messages := self._splitter.feed(data):
                for message in messages:
                    whole.append(_decode(message))
                data = b""
        except (ValueError, msgspec.DecodeError):
            self.is_garbled = True
        for frame in whole:
            self._on_frame(self, frame)
        if self.is_garbled:
            self._on_exit(self, "garbage")
        return "eof" if self.is_garbled else "more"

    def read_out(self) -> None:
        """After the fence: every whole frame that is in the socket counts (DESIGN §5.3)."""
        self._loop.remove_reader(self._sock.fileno())
        while self._receive() == "more":
            pass

    # -- living and dying ----------------------------------------------------------------------------------------

    def status(self) -> status.Status | None:
        """The worker's heartbeat: its last one that was whole, None before the first.

        A worker may come to a stand in the middle of writing one. Then the page is torn for ever, and what it said
        before grows old: that it must be judged by.
        """
        if not self._closed:
            self._status = status.read(self._page) or self._status
        return self._status

    def is_exiting(self) -> bool:
        """Whether the kernel already tears the main thread down, long before descriptors close."""
        try:
            return proc.parse_stat(os.pread(self._stat_file, 1024, 0)).exiting
        except ProcessLookupError:
            return True

    def is_stopped(self) -> bool:
        """Whether a stop signal holds it."""
        return any(stat.state in "Tt" for stat in proc.task_stats(self.pid))

    def waited_s(self, tid: int, since_ns: int) -> float:
        """Seconds that the loop's thread has waited for a core since its schedstat stood at `since_ns`."""
        return max(0, proc.waited_ns(self.pid, tid) - since_ns) / 1e9

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Signal it through its pidfd; nothing happens if it is gone."""
        try:
            signal.pidfd_send_signal(self.child.pidfd, signum)
        except ProcessLookupError:
            pass

    def await_end(self, timeout_s: float) -> None:
        """Block until it is gone; only for the box's own end."""
        poll = select.poll()
        poll.register(self.child.pidfd, select.POLLIN)
        poll.poll(1000 * timeout_s)

    async def fenced(self) -> None:
        """Kill it and wait until no thread of it can run user code."""
        self.kill()
        while not proc.runs_no_user_code(self.pid):
            # /proc cannot be waited for; the pidfd can, but fires only after the address space is torn down
            await asyncio.wait([self.exited], timeout=0.001)

    def exit_status(self) -> int | None:
        """Exit code or minus the signal, as far as it is known now: from the reaper, else from the dying task."""
        if self.child.status.done():
            return self.child.status.result()
        codes = [stat.exit_code for stat in proc.task_stats(self.pid) if stat.exiting]
        return os.waitstatus_to_exitcode(codes[0]) if codes and codes[0] else None

    def _pidfd_ready(self) -> None:
        self._loop.remove_reader(self.child.pidfd)
        if not self.exited.done():
            self.exited.set_result(None)
        self._on_exit(self, "pidfd")

    def close(self) -> None:
        """Give back every descriptor."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._loop.remove_reader(self.child.pidfd)
        self._sock.close()
        os.close(self.child.pidfd)
        os.close(self._stat_file)
        self._page.close()
