"""What every handler of one app shares, and how a handler reads its request."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from lumenbox.api.limits import Limits
from lumenbox.api.logprobs import LogprobForms
from lumenbox.api.metrics import Metrics
from lumenbox.api.problems import clip
from lumenbox.api.prompts import PromptMaker
from lumenbox.api.protocol import Body, Decoded, decode
from lumenbox.coordinator.streams import Service
from lumenbox.errors import RequestError

IGNORED_HEADER = "x-lumenbox-ignored-params"
IGNORED_CHARS = 512
ID_CHARS = 128


@dataclass(slots=True, frozen=True)
class Context:
    """The parts behind one app."""

    service: Service
    prompts: PromptMaker
    logprobs: LogprobForms
    metrics: Metrics
    api_keys: tuple[bytes, ...]
    defaults: Mapping[str, Any]
    limits: Limits


CONTEXT = web.AppKey("context", Context)


def request_id(given: str | None) -> str:
    """X-Request-Id: the client's own if it can stand in a header, else a new one."""
    if given and len(given) <= ID_CHARS and given.isascii() and given.isprintable():
        return given
    return f"req-{uuid.uuid4().hex}"


async def read_json(request: web.Request, kind: type[Body], limits: Limits) -> Decoded[Body]:
    """The request's body as `kind`. Raises RequestError (400, 408, 413, 415)."""
    check_content_type(request)
    return decode(await read_body(request, limits), kind)


def check_content_type(request: web.Request) -> None:
    """JSON, or nothing said; a form or a file is a mistake worth telling apart from bad JSON."""
    if not request.headers.get("Content-Type"):
        return
    kind = request.content_type
    if kind != "application/json" and not kind.endswith("+json"):
        message = f"content type {clip(kind)} is not supported; send application/json"
        raise RequestError(message, status=415, code="unsupported_media_type")


async def read_body(request: web.Request, limits: Limits) -> bytes:
    """The whole body, within one deadline however it arrives. An announced size is believed before a byte is read."""
    if (request.content_length or 0) > limits.max_body_bytes:
        raise too_large(limits)
    data = bytearray()
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for part in request.content.iter_any():
                data += part
                if len(data) > limits.max_body_bytes:
                    raise too_large(limits)
    except TimeoutError:
        message = f"the body was not whole after {limits.body_timeout_s:g} s"
        raise RequestError(message, status=408, code="request_timeout") from None
    except web.RequestPayloadError:
        raise RequestError("the body is not what its headers announce", code="invalid_body") from None
    return bytes(data)


def too_large(limits: Limits) -> RequestError:
    """413."""
    return RequestError(f"the body is over {limits.max_body_bytes} bytes", status=413, code="body_too_large")


def check_model(asked: str | None, served: str) -> None:
    """No name means the served one; another name is 404, so that nobody is answered by the wrong model."""
    if asked is not None and asked != served:
        message = f"model {clip(asked)!r} is not served here; served is {served!r}"
        raise RequestError(message, status=404, code="model_not_found", param="model")


def ignored_header(names: list[str]) -> dict[str, str]:
    """The header that names the fields without effect; what cannot stand in a header is left out."""
    sane = [name for name in names if name.isascii() and name.isprintable()]
    return {IGNORED_HEADER: ", ".join(sane)[:IGNORED_CHARS]} if sane else {}
