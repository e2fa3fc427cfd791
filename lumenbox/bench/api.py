"""`lumenbox bench api`: CPU time of the coordinator per streamed token, with workers that answer at once.

The coordinator and its API are the real ones, in this process. The workers are real loops around an engine that draws
tokens without a model, in a child each; the clients are another child. Only this process's CPU time is counted.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from lumenbox.api import server as api_server
from lumenbox.api.app import make_app
from lumenbox.api.limits import DEFAULT_LIMITS
from lumenbox.config import BoxConfig
from lumenbox.coordinator import monitor
from lumenbox.coordinator.box import Box
from lumenbox.coordinator.forkserver import Child, ForkServer
from lumenbox.coordinator.link import WorkerLink, socket_pair
from lumenbox.core.batching import Batch
from lumenbox.core.requests import Sampled
from lumenbox.memory import segment, status
from lumenbox.memory.layout import LoadReport, PageLayout
from lumenbox.models import catalogue, facts
from lumenbox.models.tokenizer import Tokenizer
from lumenbox.wire import frames

WORKERS = 2
PAGE_SIZE = 16
PAGES = 1 << 15
REPORT = LoadReport(
    weights=(),
    weight_bytes=0,
    page=PageLayout(PAGE_SIZE, 0, "float32", ()),
    dtype="float32",
    threads=1,
    numeric_class="none",
    identity="none",
    exact=False,
    inexact_reason="no model",
    min_rows=1,
)


class NoModel:
    """An engine that draws the letters in turn."""

    class Pool:
        num_pages = PAGES

    pool = Pool()

    def execute(self, batch: Batch) -> list[Sampled]:
        return [Sampled(97 + (c.start + c.length) % 26) for c in batch.chunks if c.samples]


def run(streams: tuple[int, ...], tokens: int) -> dict[str, Any]:
    """Measure with each number of streams in turn; `tokens` a stream."""
    return {"schema": 1, "rows": [_measure(count, tokens) for count in streams]}


def _measure(streams: int, tokens: int) -> dict[str, Any]:
    pairs = [socket_pair() for _ in range(WORKERS)]
    pages = [segment.create("lumenbox-status", status.PAGE_BYTES) for _ in range(WORKERS)]
    sockets = api_server.bind("127.0.0.1", 0)
    workers = [
        _child(_work, number, theirs, fd) for number, ((_, theirs), fd) in enumerate(zip(pairs, pages, strict=True))
    ]
    wait, go = os.pipe()
    clients = _child(_ask, api_server.url(sockets[0]), streams, tokens, wait)
    os.close(wait)
    for _, theirs in pairs:
        theirs.close()
    links = list(zip(workers, [ours for ours, _ in pairs], pages, strict=True))
    document: dict[str, Any] = uvloop.run(_serve(streams, links, sockets, clients, go))
    return document


def _child(play: Callable[..., None], *arguments: Any) -> int:
    """Fork a child that plays a part; nothing here has threads or a loop yet."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            play(*arguments)
        finally:
            os._exit(0)
    return pid


def _work(number: int, sock: socket.socket, status_fd: int) -> None:
    from lumenbox.worker.faults import Faults
    from lumenbox.worker.link import CoordinatorGone, Link
    from lumenbox.worker.loop import WorkerLoop

    limits = frames.SchedulerLimits(max_num_seqs=256, token_budget=2048, max_model_len=8192)
    boot = frames.Boot(number, 1, "", REPORT, limits, "cpu", [])
    writer = status.StatusWriter(segment.attach(status_fd), os.getpid())
    link = Link(sock)
    link.send(frames.Ready(1, PAGES, False))
    try:
        WorkerLoop(link, writer, NoModel(), boot, Faults([], number, 1)).run([])  # type: ignore[arg-type]
    except CoordinatorGone:
        pass


def _ask(endpoint: str, streams: int, tokens: int, start: int) -> None:
    os.read(start, 1)
    asyncio.run(_ask_all(endpoint, streams, tokens))


async def _ask_all(endpoint: str, streams: int, tokens: int) -> None:
    body = {"messages": [{"role": "user", "content": "go"}], "stream": True, "max_tokens": tokens, "ignore_eos": True}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one() -> None:
            async with session.post(endpoint + "/v1/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                async for _ in response.content.iter_any():
                    pass

        await asyncio.gather(*(one() for _ in range(streams)))


async def _serve(
    streams: int, children: list[tuple[int, socket.socket, int]], sockets: list[socket.socket], clients: int, go: int
) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    model_dir = catalogue.resolve("tiny-random")
    tokenizer = Tokenizer.load(model_dir)
    with tempfile.TemporaryDirectory(prefix="lumenbox-bench-") as run_dir:
        config = BoxConfig("none", model_dir, "none", WORKERS, "127.0.0.1", 0, Path(run_dir), recovery="none")
        box = Box(config, facts.check(model_dir), tokenizer.token_bytes, _no_fork_server)
        box.report, box.max_model_len = REPORT, 8192
        server = api_server.Server(make_app(box, tokenizer), DEFAULT_LIMITS)
        await server.open(sockets)
        watching = loop.create_task(monitor.watch(box))
        for slot, (pid, sock, status_fd) in zip(box.slots, children, strict=True):
            child = Child(pid, os.pidfd_open(pid), loop.create_future())
            slot.link = WorkerLink(slot.worker, 1, sock, segment.attach(status_fd), child, box.on_frame, box.on_exit)
            os.close(status_fd)
        await box.until(lambda: box.num_ready == WORKERS)
        cpu, wall = time.process_time(), time.monotonic()
        os.write(go, b".")
        os.close(go)
        await asyncio.to_thread(os.waitpid, clients, 0)
        cpu, wall = time.process_time() - cpu, time.monotonic() - wall
        watching.cancel()
        drawn = box.ledger.generated_tokens
        await server.close(0.1)
        box.close()
    for pid, _, _ in children:
        os.waitpid(pid, 0)  # noqa: ASYNC222 (they end with their sockets, and nothing else runs here)
    return {
        "streams": streams,
        "tokens": drawn,
        "cpu_us_per_token": round(1e6 * cpu / drawn, 1),
        "tokens_per_s": round(drawn / wall, 1),
    }


def _no_fork_server(environment: dict[str, str]) -> ForkServer:
    raise AssertionError("the workers of this benchmark are not replaced")
