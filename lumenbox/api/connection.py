"""One client's connection: aiohttp's, with the deadlines and bounds that aiohttp does not have.

aiohttp 3.14 waits for a header as long as its keep-alive lasts, answers bad HTTP in text/plain with a traceback in the
log, and lets a client that does not read its finished answer hold the socket for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from aiohttp import web

from lumenbox.api.context import request_id
from lumenbox.api.limits import Limits
from lumenbox.api.problems import BUGS, error_response, internal_problem
from lumenbox.errors import RequestError

LINGERING_S = 5.0
"""After an early refusal the rest of the body is read away this long, so that the client gets to see the answer."""


class Connection(web.RequestHandler):
    """Idle → header (deadline) → busy → idle. `begin` and `end` are called by the server's middleware."""

    def __init__(
        self, manager: web.Server, limits: Limits, on_close: Callable[[], None], loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(
            manager,
            loop=loop,
            keepalive_timeout=limits.keepalive_timeout_s,
            lingering_time=LINGERING_S,
            access_log=None,  # type: ignore[arg-type]
        )
        self._limits = limits
        self._on_close = on_close
        self._wire: asyncio.Transport | None = None
        self._header_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        self._wire.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        super().connection_made(transport)
        self._expect_header()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._wire = None
        self._stop_timers()
        super().connection_lost(exc)
        self._on_close()

    def data_received(self, data: bytes) -> None:
        if not self._busy and self._header_timer is None:
            self._expect_header()
        super().data_received(data)

    def begin(self) -> None:
        """A request's header is whole."""
        self._busy = True
        self._stop_timers()

    def end(self) -> None:
        """The handler is done; its last bytes may still wait for the client to read."""
        self._busy = False
        if self._wire is not None:
            self._look_later(0)

    def _expect_header(self) -> None:
        self._header_timer = self._loop.call_later(self._limits.header_timeout_s, self.force_close)

    def _look_later(self, before: int) -> None:
        self._unread_timer = self._loop.call_later(self._limits.drain_timeout_s, self._look_for_unread, before)

    def _look_for_unread(self, before: int) -> None:
        """Drop a client that has read nothing of its finished answer since the last look (`before` bytes, 0: none)."""
        left = self._wire.get_write_buffer_size() if self._wire is not None else 0
        if self._wire is not None and 0 < before <= left:
            self._wire.abort()
        elif left:
            self._look_later(left)

    def _stop_timers(self) -> None:
        for timer in (self._header_timer, self._unread_timer):
            if timer is not None:
                timer.cancel()
        self._header_timer = self._unread_timer = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is no HTTP request, in JSON and without a word in the log; a 500 is a bug and is noted."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        if status >= 500 and exc is not None:
            BUGS.note(exc)
        if status >= 500:
            problem = internal_problem()
        else:
            problem = RequestError("this is not a well-formed HTTP request", status=status, code="invalid_http")
        response = error_response(problem)
        response.headers["X-Request-Id"] = request_id(None)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """aiohttp's tracebacks, folded to one line a kind."""
        if isinstance(error := kw.get("exc_info"), BaseException):
            BUGS.note(error)
