"""A small fork server: it imports torch and transformers once, then forks loaders and workers in milliseconds.

It has one thread and never runs a parallel operator (a child of one that has hangs in its own), no CUDA, no tokenizer.
It ends when the coordinator's end of its socket closes, or with the coordinator itself; its children end with it.

    python -m lumenbox.worker.forkserver FD PARENT_PID MODEL_DIR
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from lumenbox.errors import ModelError
from lumenbox.memory import process
from lumenbox.wire import frames

MAX_MESSAGE = 64 << 10
MAX_FDS = 8
PRELOADED = ("torch", "transformers", "safetensors.torch", "lumenbox.worker.roles")


def main() -> None:
    """Import, report warm, serve until the socket closes."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    process.die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    started = time.monotonic()
    if os.environ.get("LUMENBOX_PRELOAD") != "0":  # `bench chaos --peer cold-start` shows what that would cost
        preload(Path(sys.argv[3]))
    server = ForkServer(sock)
    server.send(frames.Warm(time.monotonic() - started))
    server.serve()


def preload(model_dir: Path) -> None:
    """Import what children need, single-threaded, and keep the collector from dirtying shared pages.

    Building the model once on the meta device (no memory, no arithmetic) imports its class and warms what torch and
    transformers make on first use: that took 110 of the 150 ms of a birth.
    """
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive", TOKENIZERS_PARALLELISM="false")
    for name in PRELOADED:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    architecture = importlib.import_module("lumenbox.engine.architecture")
    try:
        architecture.meta_model(architecture.read_config(model_dir), "float32")
    except ModelError:
        pass  # the loader will say so, to someone who listens
    gc.collect()
    gc.freeze()


class ForkServer:
    """Forks on request, reaps, reports."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._tokens: dict[int, int] = {}
        self._wakeup, wakeup_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup_end, warn_on_full_buffer=False)
        self._wakeup_end = wakeup_end

    def serve(self) -> None:
        """Wait for orders and for dead children."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._wakeup, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._wakeup in ready:
                os.read(self._wakeup, 4096)
                self._reap()
            if self._sock.fileno() in ready and not self._take_order():
                return

    def send(self, message: frames.FromForkServer, fds: list[int] | None = None) -> None:
        """One message is one packet."""
        socket.send_fds(self._sock, [frames.encode(message)], fds or [])

    def _take_order(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._sock, MAX_MESSAGE, MAX_FDS)
        if not data:
            return False
        order = msgspec.msgpack.decode(data, type=frames.Fork)
        try:
            pid, pidfd = self._fork(order, fds)
        except OSError as error:
            self.send(frames.NotForked(order.token, os.strerror(error.errno or 0)))
            return True
        finally:
            for fd in fds:
                os.close(fd)
        self._tokens[pid] = order.token
        self.send(frames.Forked(order.token, pid), [pidfd])
        os.close(pidfd)
        return True

    def _fork(self, order: frames.Fork, fds: list[int]) -> tuple[int, int]:
        """(pid, pidfd) of a child."""
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(order, fds, parent)
        try:
            pidfd = os.pidfd_open(pid)  # nobody else reaps, so the number is still this child's
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        return pid, pidfd

    def _reap(self) -> None:
        while self._tokens:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self.send(frames.Exited(self._tokens.pop(pid), pid, os.waitstatus_to_exitcode(status)))

    def _become(self, order: frames.Fork, fds: list[int], parent: int) -> None:
        """In the child: shed everything of the server's, play the role, and never return."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            process.die_with_parent(parent)
            sock_fd, log_fd, *rest = fds
            os.dup2(log_fd, 1)
            os.dup2(log_fd, 2)
            process.close_all_but({sock_fd, *rest})
            process.go_first_when_memory_ends()
            os.environ.update(order.environment)
            role: Callable[..., int] = getattr(importlib.import_module("lumenbox.worker.roles"), order.role)
            sock = socket.socket(fileno=sock_fd)  # open until the very end: whoever sees it closed kills, and the
            code = role(sock, rest, order.spec)  # exit code, which says whether we are to blame, would be lost
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:  # noqa: BLE001 (the child's last frame: everything must end in _exit)
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


if __name__ == "__main__":
    main()
