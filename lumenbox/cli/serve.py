"""The life of a box: lock, port, model, fork server, event loop, ready line, drain, end."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from lumenbox.api import server as api_server
from lumenbox.api.app import make_app
from lumenbox.api.limits import DEFAULT_LIMITS
from lumenbox.cli.models import progress_on_stderr
from lumenbox.config import BoxConfig
from lumenbox.coordinator import monitor, verbs
from lumenbox.coordinator.births import open_log
from lumenbox.coordinator.box import Box
from lumenbox.coordinator.control import ControlServer, Verb
from lumenbox.coordinator.forkserver import ForkServer
from lumenbox.errors import LumenboxError, StartupError, TimedOut
from lumenbox.memory import sizing
from lumenbox.models import catalogue, facts
from lumenbox.models.tokenizer import Tokenizer

log = logging.getLogger("lumenbox")
SIGNAL_EXIT = 128
Show = Callable[[dict[str, Verb]], Coroutine[Any, Any, None]]
"""Shows a box, by its verbs, until cancelled."""


def serve(config: BoxConfig, wait_s: float, show: Show | None = None) -> int:
    """Run the box until it is told to end; returns the exit code. `show` begins after the ready line."""
    with _locked(config.run_dir):
        _log_to(config.run_dir)
        _raise_descriptor_limit()
        sockets = api_server.bind(config.host, config.port)
        try:
            with progress_on_stderr() as progress:
                config = replace(config, model_dir=catalogue.resolve(config.model, progress))
            found = facts.check(config.model_dir)
            sizing.require(found.weight_bytes, "the weights", "choose a smaller model")
            fork_server = _new_fork_server(config, {})
            code: int = uvloop.run(_Run(config, found, fork_server, sockets, show).run(wait_s))
            return code
        finally:
            for sock in sockets:
                sock.close()


@contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """Own the run directory; the lock ends with the process, however that ends."""
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise StartupError(
            f"another lumenbox runs in {run_dir}: stop it with `lumenbox down`, or pass another --run-dir"
        ) from None
    try:
        yield
    finally:
        os.close(fd)


def _log_to(run_dir: Path) -> None:
    """One log for people: stderr and a file in the run directory, which starts anew with each box."""
    for old in run_dir.glob("*.log"):
        old.unlink()
    form = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")
    for handler in (logging.StreamHandler(sys.stderr), logging.FileHandler(run_dir / "lumenbox.log")):
        handler.setFormatter(form)
        log.addHandler(handler)
    log.setLevel(logging.INFO)


def _raise_descriptor_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 1 << 16) if hard != resource.RLIM_INFINITY else 1 << 16
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _new_fork_server(config: BoxConfig, environment: dict[str, str]) -> ForkServer:
    log_fd = open_log(config, "fork-server")
    try:
        return ForkServer(config.model_dir, environment, log_fd)
    finally:
        os.close(log_fd)


class _Done(Exception):
    """Carries the exit code out of the task group."""

    def __init__(self, code: int) -> None:
        self.code = code


class _Run:
    """One box on one event loop."""

    def __init__(
        self,
        config: BoxConfig,
        found: facts.ModelFacts,
        fork_server: ForkServer,
        sockets: list[socket.socket],
        show: Show | None,
    ) -> None:
        self._config = config
        self._facts = found
        self._fork_server = fork_server
        self._sockets = sockets
        self._show = show
        self._signals: asyncio.Queue[int] = asyncio.Queue()

    async def run(self, wait_s: float) -> int:
        """Come up, serve, drain, end."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_loop_error)
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._signals.put_nowait, signum)
        tokenizer = Tokenizer.load(self._config.model_dir)
        self._box = box = Box(
            self._config,
            self._facts,
            tokenizer.token_bytes,
            lambda environment: _new_fork_server(self._config, environment),
        )
        box.endpoint = api_server.url(self._sockets[0])
        defaults = tokenizer.generation_defaults if self._config.generation_config == "model" else {}
        app = make_app(box, tokenizer, api_keys=self._config.api_keys, generation_defaults=defaults)
        http = api_server.Server(app, DEFAULT_LIMITS)
        control = ControlServer(self._config.run_dir, verbs.table(box, self._signals))
        await http.open(self._sockets)
        await control.open()
        try:
            return await self._live(box, wait_s)
        finally:
            box.give_up()
            await http.close(1.0)
            await control.close()
            box.close()

    async def _live(self, box: Box, wait_s: float) -> int:
        code = 1
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(monitor.watch(box))
                tasks.create_task(_beat(box))
                starting = tasks.create_task(self._start(box, tasks, wait_s))
                raise _Done(await self._serve_until_told(box, starting))
        except* _Done as done:
            code = int(next(_leaves(done)).code)
        except* LumenboxError as errors:
            raise next(_leaves(errors)) from None
        return code

    async def _start(self, box: Box, tasks: asyncio.TaskGroup, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                await box.start(self._fork_server, tasks)
                await box.until(lambda: box.is_over or all(map(box.is_settled, box.core.state.workers)))
        except TimeoutError:
            if not box.core.state.has_served:
                raise TimedOut(f"not ready within {wait_s:.0f} s; the logs are in {box.config.run_dir}") from None
        if not box.is_over:
            gc.collect()
            gc.freeze()
            print(_ready_line(box), flush=True)
            if self._show is not None:
                tasks.create_task(self._show(verbs.table(box, self._signals)))

    async def _serve_until_told(self, box: Box, starting: asyncio.Task[None]) -> int:
        told = asyncio.ensure_future(self._signals.get())
        ends: list[asyncio.Future[Any]] = [told, box.ended]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if box.ended.done():
            told.cancel()
            raise StartupError(box.ended.result().why)
        signum, was_ready = told.result(), starting.done()
        code = await self._drain(box, signum) if box.core.state.has_served else 0
        return code if was_ready or signum == verbs.NOW else SIGNAL_EXIT + signum

    async def _drain(self, box: Box, signum: int) -> int:
        """Let running requests finish, up to the deadline or a second signal."""
        log.info("draining: %d requests", len(box.core.state.requests))
        box.ask("shutdown")
        drained = asyncio.ensure_future(box.drained())
        again = asyncio.ensure_future(self._signals.get())
        timeout = 0.0 if signum == verbs.NOW else self._config.drain_timeout_s
        ends: list[asyncio.Future[Any]] = [drained, again]
        await asyncio.wait(ends, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        complete = drained.done()
        drained.cancel()
        again.cancel()
        if complete or signum == verbs.NOW:
            return 0
        log.warning("stopping with %d requests unfinished", len(box.core.state.requests))
        return SIGNAL_EXIT + signum

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback of ours that raises is a bug: better to end, and be restarted, than to serve half dead."""
        error = context.get("exception")
        log.error("%s", context.get("message"), exc_info=error)
        if error is not None and "handle" in context:
            self._signals.put_nowait(signal.SIGTERM)


async def _beat(box: Box) -> None:
    while True:
        await asyncio.sleep(1.0)
        box.beat()


def _leaves(group: BaseExceptionGroup[Any]) -> Iterator[Any]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _ready_line(box: Box) -> str:
    return f"lumenbox ready {box.endpoint} workers={box.num_ready}/{box.config.workers} model={box.config.served_name}"
