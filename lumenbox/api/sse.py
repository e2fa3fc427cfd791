"""One streamed answer on its way to one client, who may be slow, deaf or gone."""

from __future__ import annotations

import asyncio
from typing import cast

from aiohttp import web
from aiohttp.http import StreamWriter

from lumenbox.api.chunks import HEARTBEAT, Chunks, error_event
from lumenbox.api.context import CONTEXT
from lumenbox.api.metrics import StreamMeter
from lumenbox.api.problems import BUGS, internal_problem
from lumenbox.coordinator.streams import Stream
from lumenbox.errors import RequestError

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class Line:
    """The way to the client: one write per event, bounded in bytes and in the time that a full buffer may stand."""

    def __init__(self, request: web.Request, writer: StreamWriter, timeout_s: float) -> None:
        self._protocol = request.protocol
        self._writer = writer
        self._timeout_s = timeout_s

    async def send(self, event: bytes) -> None:
        """Write; wait only for a client that is too far behind. Raises ConnectionError when it is gone or dropped."""
        await self._writer.write(event, drain=False)
        if self._protocol.writing_paused:
            await self._drain()

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._writer.drain()
        except TimeoutError:
            if self._writer.transport is not None:
                self._writer.transport.abort()
            raise ConnectionAbortedError("the client does not read") from None


async def send_stream(
    request: web.Request, headers: dict[str, str], stream: Stream, chunks: Chunks, meter: StreamMeter
) -> web.StreamResponse:
    """Headers at once, then every delta, to the end that CONTRACT §3 promises."""
    response = web.StreamResponse(headers=HEADERS | headers)
    writer = cast(StreamWriter, await response.prepare(request))
    writer.send_headers()
    line = Line(request, writer, request.app[CONTEXT].limits.drain_timeout_s)
    try:
        await pump(line, stream, chunks, meter)
    except RequestError as problem:
        meter.failed()
        await line.send(error_event(problem))
    except ConnectionError:
        raise
    except Exception as error:  # noqa: BLE001 - a bug of ours must not look like a finished answer
        BUGS.note(error)
        meter.failed()
        await line.send(error_event(internal_problem()))
    return response


async def pump(line: Line, stream: Stream, chunks: Chunks, meter: StreamMeter) -> None:
    """Everything from the first delta to [DONE]."""
    while True:
        try:
            deltas = await stream.next()
        except StopAsyncIteration:
            break
        if not deltas:
            await line.send(HEARTBEAT)
        for delta in deltas:
            meter.saw(delta)
            for event in chunks.events(delta):
                await line.send(event)
    for event in chunks.ending():
        await line.send(event)
