"""Everything but generation: models, tokens, health, metrics, documents."""

from __future__ import annotations

from typing import Any

from aiohttp import web

import lumenbox
from lumenbox.api.context import CONTEXT, Context, check_model, ignored_header, read_json
from lumenbox.api.metrics import CONTENT_TYPE
from lumenbox.api.openapi import document
from lumenbox.api.problems import encode
from lumenbox.api.protocol import DetokenizeBody, TokenizeBody
from lumenbox.coordinator.streams import ModelInfo
from lumenbox.errors import RequestError

SERVING = ("ready", "degraded")


def json_answer(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A JSON body."""
    return web.Response(
        body=encode(value), status=status, headers=headers, content_type="application/json", charset="utf-8"
    )


def model_object(info: ModelInfo) -> dict[str, Any]:
    """OpenAI's model object, with vLLM's `max_model_len`."""
    return {
        "id": info.name,
        "object": "model",
        "created": info.created,
        "owned_by": "lumenbox",
        "max_model_len": info.max_model_len,
    }


async def models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    info = request.app[CONTEXT].service.info
    return json_answer({"object": "list", "data": [model_object(info)]})


async def model(request: web.Request) -> web.Response:
    """GET /v1/models/{id}."""
    info = request.app[CONTEXT].service.info
    check_model(request.match_info["id"], info.name)
    return json_answer(model_object(info))


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize."""
    context = request.app[CONTEXT]
    decoded = await read_json(request, TokenizeBody, context.limits)
    body = decoded.body
    check_model(body.model, context.service.info.name)
    ids = await ids_of(context, body)
    table = context.prompts.tokenizer.token_bytes
    strings = [table[i].decode("utf-8", errors="replace") for i in ids] if body.return_token_strs else None
    answer = {"count": len(ids), "max_model_len": context.service.info.max_model_len}
    return json_answer(answer | {"tokens": ids, "token_strs": strings}, headers=ignored_header(decoded.ignored))


async def ids_of(context: Context, body: TokenizeBody) -> list[int]:
    """The ids of the one of `prompt` and `messages` that is given."""
    if body.messages is not None and body.prompt is None:
        return await context.prompts.chat(body.messages, body.chat_template_kwargs or {})
    if body.prompt is not None and body.messages is None:
        return await context.prompts.text(body.prompt)
    raise RequestError("prompt: give either prompt or messages", param="prompt")


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize."""
    context = request.app[CONTEXT]
    decoded = await read_json(request, DetokenizeBody, context.limits)
    check_model(decoded.body.model, context.service.info.name)
    text = await context.prompts.decode(decoded.body.tokens)
    return json_answer({"prompt": text}, headers=ignored_header(decoded.ignored))


def serving(state: dict[str, Any]) -> bool:
    """Whether a request that comes now would be worked on."""
    return state["state"] in SERVING and any(worker["state"] == "ready" for worker in state["workers"])


async def health(request: web.Request) -> web.Response:
    """GET /health: of the workers, not of this process. A box that says ready with nobody ready is dead."""
    state = request.app[CONTEXT].service.state()
    good = serving(state)
    status = "dead" if state["state"] in SERVING and not good else state["state"]
    workers = [{"id": worker["id"], "state": worker["state"]} for worker in state["workers"]]
    return json_answer({"status": status, "workers": workers}, status=200 if good else 503)


async def live(_request: web.Request) -> web.Response:
    """GET /live: this process answers."""
    return json_answer({"status": "live"})


async def ready(request: web.Request) -> web.Response:
    """GET /ready: a worker is ready and intake is open."""
    good = serving(request.app[CONTEXT].service.state())
    return json_answer({"status": "ready" if good else "not ready"}, status=200 if good else 503)


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics."""
    return web.Response(body=request.app[CONTEXT].metrics.expose(), headers={"Content-Type": CONTENT_TYPE})


async def version(_request: web.Request) -> web.Response:
    """GET /version."""
    return json_answer({"version": lumenbox.__version__})


async def openapi(_request: web.Request) -> web.Response:
    """GET /openapi.json."""
    return json_answer(document(lumenbox.__version__))


async def state(request: web.Request) -> web.Response:
    """GET /lumenbox/state: what `status --json` prints."""
    return json_answer(request.app[CONTEXT].service.state())
