"""The HTTP application: routes, keys, request ids, and JSON for every refusal."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

from aiohttp import web

from lumenbox.api import generate, routes
from lumenbox.api.context import CONTEXT, Context, request_id
from lumenbox.api.limits import DEFAULT_LIMITS, Limits
from lumenbox.api.logprobs import LogprobForms
from lumenbox.api.metrics import Metrics
from lumenbox.api.openapi import OPEN
from lumenbox.api.problems import BUGS, error_response, http_problem, internal_problem
from lumenbox.api.prompts import PromptMaker
from lumenbox.coordinator.streams import Service
from lumenbox.errors import RequestError
from lumenbox.models.tokenizer import Tokenizer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
REQUEST_ID = web.RequestKey("request_id", str)


def make_app(
    service: Service,
    tokenizer: Tokenizer,
    *,
    api_keys: tuple[str, ...] = (),
    generation_defaults: Mapping[str, Any] = MappingProxyType({}),
    limits: Limits = DEFAULT_LIMITS,
) -> web.Application:
    """The app for one box. `generation_defaults` are the sampling fields of `--generation-config model`."""
    app = web.Application(middlewares=[whole_request])
    app[CONTEXT] = Context(
        service=service,
        prompts=PromptMaker(tokenizer, service, max_waiting=limits.max_tokenizing),
        logprobs=LogprobForms(tokenizer.token_bytes),
        metrics=Metrics(service),
        api_keys=tuple(key.encode() for key in api_keys),
        defaults=generation_defaults,
        limits=limits,
    )
    app.on_response_prepare.append(name_response)
    app.cleanup_ctx.append(tokenizer_threads)
    app.add_routes(
        [
            web.post("/v1/chat/completions", generate.chat),
            web.post("/v1/completions", generate.complete),
            web.get("/v1/models", routes.models),
            web.get("/v1/models/{id:.+}", routes.model),
            web.post("/tokenize", routes.tokenize),
            web.post("/detokenize", routes.detokenize),
            web.get("/health", routes.health),
            web.get("/live", routes.live),
            web.get("/ready", routes.ready),
            web.get("/metrics", routes.metrics),
            web.get("/version", routes.version),
            web.get("/openapi.json", routes.openapi),
            web.get("/lumenbox/state", routes.state),
        ]
    )
    return app


async def tokenizer_threads(app: web.Application) -> AsyncIterator[None]:
    """The threads live as long as the app."""
    yield
    app[CONTEXT].prompts.close()


async def name_response(request: web.Request, response: web.StreamResponse) -> None:
    """X-Request-Id on every answer, streams included."""
    response.headers["X-Request-Id"] = request[REQUEST_ID]


@web.middleware
async def whole_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What holds for every route: an id, a key, and JSON for whatever is raised."""
    request[REQUEST_ID] = request_id(request.headers.get("X-Request-Id"))
    try:
        check_key(request)
        return await handler(request)
    except RequestError as problem:
        return error_response(problem)
    except web.HTTPException as error:
        return http_problem(error, f"{request.method} {request.path}")
    except ConnectionError:  # the client is gone; aiohttp knows what to do
        raise
    except Exception as error:  # noqa: BLE001 - the last line: a bug becomes a 500 in JSON and one line in the log
        BUGS.note(error)
        return error_response(internal_problem())


def check_key(request: web.Request) -> None:
    """Raise RequestError(401) unless the key is one of ours. Every key is compared, each in constant time."""
    keys = request.app[CONTEXT].api_keys
    if not keys or request.path in OPEN:
        return
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    token = given.strip().encode("utf-8", errors="surrogateescape")
    matches = [hmac.compare_digest(token, key) for key in keys]
    if scheme.lower() != "bearer" or not any(matches):
        raise RequestError("the API key is missing or wrong", status=401, code="invalid_api_key")
