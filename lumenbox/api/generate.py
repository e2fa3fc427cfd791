"""The two generating calls: check, tokenise, submit, answer. The order is CONTRACT §3's: all checks before headers."""

from __future__ import annotations

import time

from aiohttp import web

from lumenbox.api.answers import answer_object, collect
from lumenbox.api.chunks import Chunks
from lumenbox.api.context import CONTEXT, Context, check_model, ignored_header, read_json
from lumenbox.api.metrics import StreamMeter
from lumenbox.api.problems import encode
from lumenbox.api.protocol import ChatBody, CompletionBody, Decoded
from lumenbox.api.reply import Reply, reply_for
from lumenbox.api.sampling import sampling_params, seed_of, stops_of
from lumenbox.api.sse import send_stream
from lumenbox.coordinator.streams import GenerationSpec, Stream
from lumenbox.errors import RequestError


async def chat(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    context, arrived = request.app[CONTEXT], time.monotonic()
    decoded = await read_json(request, ChatBody, context.limits)
    body = decoded.body
    check_model(body.model, context.service.info.name)
    specification(context, body, [[]])  # a bad number is told before a long prompt costs its tokenising
    prompt = await context.prompts.chat(body.messages, body.chat_template_kwargs or {})
    return await answer(request, decoded, specification(context, body, [prompt]), arrived)


async def complete(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    context, arrived = request.app[CONTEXT], time.monotonic()
    decoded = await read_json(request, CompletionBody, context.limits)
    body = decoded.body
    check_model(body.model, context.service.info.name)
    specification(context, body, [[]])
    prompts = await context.prompts.completion(body.prompt)
    return await answer(request, decoded, specification(context, body, prompts), arrived)


def specification(context: Context, body: ChatBody | CompletionBody, prompts: list[list[int]]) -> GenerationSpec:
    """The call in the coordinator's words.

    max_tokens is clamped to what the context leaves beside the SHORTEST prompt; the box bounds each longer one by its
    own room.
    """
    info = context.service.info
    params = sampling_params(
        body,
        room=info.max_model_len - min(map(len, prompts)),
        vocab_size=info.vocab_size,
        eos_ids=context.prompts.tokenizer.eos_ids,
        defaults=context.defaults,
    )
    return GenerationSpec(
        prompts=prompts,
        params=params,
        n=body.n or 1,
        seed=seed_of(body),
        stop=stops_of(body),
        include_stop=bool(body.include_stop_str_in_output),
        priority=body.priority or 0,
    )


async def answer(
    request: web.Request,
    decoded: Decoded[ChatBody] | Decoded[CompletionBody],
    spec: GenerationSpec,
    arrived: float,
) -> web.StreamResponse:
    """Submit, and answer in the form that was asked for. The stream is closed whatever happens."""
    context = request.app[CONTEXT]
    reply = reply_for(decoded.body, spec, context.service.info.name, context.logprobs)
    headers = ignored_header(decoded.ignored)
    stream = context.service.submit(spec)
    meter = StreamMeter(context.metrics, reply.choices, arrived)
    try:
        if decoded.body.stream:
            return await send_stream(request, headers, stream, Chunks(reply, stream), meter)
        return await plain_answer(headers, stream, reply, meter)
    finally:
        meter.close(stream)
        stream.close()


async def plain_answer(headers: dict[str, str], stream: Stream, reply: Reply, meter: StreamMeter) -> web.Response:
    """One JSON body when all choices are done. Raises RequestError when the stream cannot go on."""
    try:
        choices = await collect(stream, reply, meter)
    except RequestError:
        meter.failed()
        raise
    if stream.recoveries:
        headers["X-Lumenbox-Recoveries"] = str(stream.recoveries)
    body = encode(answer_object(reply, choices, stream))
    return web.Response(body=body, headers=headers, content_type="application/json", charset="utf-8")
