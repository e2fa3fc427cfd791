"""The coordinator's end of the fork server: one object per process, started, asked, and seen to die."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lumenbox.errors import StartupError
from lumenbox.wire import frames

_decode = msgspec.msgpack.Decoder(frames.FromForkServer).decode
COMMAND = (sys.executable, "-m", "lumenbox.worker.forkserver")
_MAX_PACKET = 64 << 10
ANSWER_DEADLINE_S = 20.0


class ForkServerGone(Exception):
    """The fork server ended before it answered."""


@dataclass(slots=True)
class Child:
    """A forked process. `status` resolves to its exit status once it is reaped (None: nobody will ever know)."""

    pid: int
    pidfd: int
    status: asyncio.Future[int | None]


class ForkServer:
    """A running fork server. Make it before the event loop runs when possible; `attach` it to the loop then."""

    def __init__(self, model_dir: Path, environment: Mapping[str, str], log_fd: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock = ours
        self._sock.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [*COMMAND, str(theirs.fileno()), str(os.getpid()), str(model_dir)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._next_token = 0
        self._forked: dict[int, asyncio.Future[Child]] = {}
        self._children: dict[int, Child] = {}
        self._reaper = threading.Thread(target=self._process.wait, daemon=True)
        self.alive = True
        self.was_warm = False
        self.on_death: Callable[[ForkServer], None] = lambda _: None

    @property
    def pid(self) -> int:
        return self._process.pid

    def attach(self) -> None:
        """Begin to listen, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self.warm: asyncio.Future[float] = self._loop.create_future()
        self._loop.add_reader(self._sock.fileno(), self._read)

    async def fork(self, role: str, fds: list[int], spec: dict[str, Any]) -> Child:
        """Fork a child with these descriptors (its socket, its log, the role's).

        Raises ForkServerGone, StartupError if the kernel allows no child. A warm server that does not answer for
        ANSWER_DEADLINE_S is killed: it hangs, and nothing can be born any more.
        """
        await asyncio.shield(self.warm)
        if not self.alive:
            raise ForkServerGone
        self._next_token += 1
        token = self._next_token
        answer: asyncio.Future[Child] = self._loop.create_future()
        self._forked[token] = answer
        try:
            socket.send_fds(self._sock, [frames.encode(frames.Fork(token, role, spec))], fds)
        except (BrokenPipeError, ConnectionResetError):
            self._died()
        except OSError:
            del self._forked[token]
            raise
        try:
            await asyncio.wait([answer], timeout=ANSWER_DEADLINE_S)
        except asyncio.CancelledError:
            if not answer.cancel() and answer.exception() is None:
                os.close(answer.result().pidfd)  # it came in the turn in which we were told to stop waiting
            raise
        if not answer.done():
            self._read()  # the pause may have been our own
        if not answer.done():
            self._process.kill()
            self._died()
        return answer.result()

    def close(self) -> None:
        """End it: its children are killed with it."""
        if self.alive:
            self._died(expected=True)
            self._process.kill()

    def await_end(self, timeout_s: float) -> None:
        """Block until it is reaped; only for the box's own end."""
        self._reaper.join(timeout_s)

    def _read(self) -> None:
        while self.alive:
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, _MAX_PACKET, 1)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data, fds = b"", []
            if not data:
                self._died()
                return
            self._take(_decode(data), fds)

    def _take(self, message: frames.FromForkServer, fds: list[int]) -> None:
        match message:
            case frames.Warm(seconds=seconds):
                self.was_warm = True
                self.warm.set_result(seconds)
            case frames.Forked(token=token, pid=pid):
                child = self._children[token] = Child(pid, fds[0], self._loop.create_future())
                if (answer := self._forked.pop(token)).cancelled():
                    os.close(fds[0])  # nobody waits for it any more; it leaves when it finds its socket closed
                else:
                    answer.set_result(child)
            case frames.NotForked(token=token, reason=reason):
                if not (answer := self._forked.pop(token)).cancelled():
                    answer.set_exception(StartupError(f"no process could be started: {reason}"))
            case frames.Exited(token=token, status=status):
                if (exited := self._children.pop(token, None)) is not None:
                    exited.status.set_result(status)

    def _died(self, expected: bool = False) -> None:
        self.alive = False
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        for answer in self._forked.values():
            if not answer.cancelled():
                answer.set_exception(ForkServerGone())
        if not self.warm.done():
            self.warm.set_exception(ForkServerGone())
            self.warm.exception()  # seen: whoever waits gets it too
        for child in self._children.values():
            if not child.status.done():
                child.status.set_result(None)
        self._reaper.start()
        if not expected:
            self.on_death(self)
