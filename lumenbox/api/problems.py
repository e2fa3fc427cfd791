"""Errors as clients see them: CONTRACT §3's JSON, and what the log learns of those that are our own fault.

Nothing here quotes an exception's text: it may hold a prompt, a path or half of a client's body.
"""

from __future__ import annotations

import logging
from collections import Counter
from types import TracebackType
from typing import Any

import msgspec
from aiohttp import web

from lumenbox.errors import RequestError

ECHO_CHARS = 200
CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large", 415: "unsupported_media_type"}

logger = logging.getLogger("lumenbox.api")
encode = msgspec.json.encode


def clip(text: str) -> str:
    """A client's own words, short enough to be sent back."""
    return text if len(text) <= ECHO_CHARS else text[:ECHO_CHARS] + "…"


def error_object(problem: RequestError) -> dict[str, Any]:
    """The body of an error answer, and of an error event in a stream."""
    fields = {"message": problem.message, "type": problem.type, "param": problem.param, "code": problem.code}
    return {"error": fields}


def error_response(problem: RequestError) -> web.Response:
    """The whole answer to a refused request. 408 and 413 close: the rest of the body is not worth reading."""
    response = web.Response(
        body=encode(error_object(problem)), status=problem.status, content_type="application/json", charset="utf-8"
    )
    if problem.status in (429, 503):
        response.headers["Retry-After"] = str(problem.retry_after_s or 1)
    if problem.code == "worker_died":
        response.headers["X-Should-Retry"] = "false"  # OpenAI's clients repeat a 500 twice: it would cost more workers
    if problem.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if problem.status in (408, 413):
        response.force_close()
    return response


def http_problem(error: web.HTTPException, asked: str) -> web.Response:
    """The router's own refusals (404, 405, 417, …) in the same form."""
    code = CODES.get(error.status, "invalid_request")
    response = error_response(RequestError(f"{error.reason}: {clip(asked)}", status=error.status, code=code))
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def internal_problem() -> RequestError:
    """A bug of ours, as its victim sees it."""
    return RequestError("internal error; the server's log has its place", status=500, code="internal_error")


class BugLog:
    """Logs each unexpected exception by kind and place, at its 1st, 10th, 100th … time, never with its text."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def note(self, error: BaseException) -> None:
        """Count `error`, and say so while it is news."""
        kind = f"{type(error).__name__} at {place_of(error.__traceback__)}"
        self._seen[kind] += 1
        times = self._seen[kind]
        if str(times).strip("0") == "1":
            logger.error("bug in a request handler: %s (seen %d times)", kind, times)


def place_of(trace: TracebackType | None) -> str:
    """file:line of the innermost frame."""
    if trace is None:
        return "unknown place"
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno}"


BUGS = BugLog()
