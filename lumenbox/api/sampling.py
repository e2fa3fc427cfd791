"""A checked body's sampling fields → SamplingParams, with the model's vocabulary and defaults at hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lumenbox.api.protocol import ChatBody, CompletionBody, Generation
from lumenbox.core.requests import SamplingParams
from lumenbox.errors import RequestError

DEFAULTABLE = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions


def sampling_params(
    body: ChatBody | CompletionBody,
    *,
    room: int,
    vocab_size: int,
    eos_ids: tuple[int, ...],
    defaults: Mapping[str, Any],
) -> SamplingParams:
    """How to draw. `room` is what the context leaves for the answer; max_tokens is clamped to it (CONTRACT §3)."""
    check_stream_options(body)
    asked = max_tokens(body)
    at_least = body.min_tokens or 0
    if asked is not None and at_least > asked:
        raise RequestError("min_tokens: must not be greater than max_tokens", param="min_tokens")
    limit = room if asked is None else min(asked, room)
    return SamplingParams(
        max_tokens=limit,
        min_tokens=min(at_least, limit),
        end_ids=end_ids(body, eos_ids, vocab_size),
        logit_bias=logit_bias(body.logit_bias or {}, vocab_size),
        logprobs=alternatives(body),
        **drawing(body, defaults),
    )


def drawing(body: Generation, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Temperature and its like: the request's word, else the given default's, else OpenAI's (SamplingParams' own)."""
    chosen = {}
    for name in DEFAULTABLE:
        value = getattr(body, name)
        if value is None:
            value = defaults.get(name)
        if value is not None:
            chosen[name] = value
    chosen["top_k"] = max(chosen.get("top_k", 0), 0)
    return chosen


def max_tokens(body: ChatBody | CompletionBody) -> int | None:
    """The answer's bound in tokens; None leaves it to the context."""
    if isinstance(body, ChatBody):
        return body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return body.max_tokens if body.max_tokens is not None else max(COMPLETION_MAX_TOKENS, body.min_tokens or 0)


def alternatives(body: ChatBody | CompletionBody) -> int:
    """SamplingParams.logprobs from chat's pair of fields or completions' single one."""
    if isinstance(body, CompletionBody):
        return -1 if body.logprobs is None else body.logprobs
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise RequestError("top_logprobs: needs logprobs: true", param="top_logprobs")
    return -1


def end_ids(body: Generation, eos_ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """Every token that ends the generation, each once, in a fixed order."""
    own = check_ids(body.stop_token_ids or [], vocab_size, "stop_token_ids")
    return tuple(dict.fromkeys([*([] if body.ignore_eos else eos_ids), *own]))


def logit_bias(bias: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    """OpenAI's map from token id (as text) to bias, ordered by id."""
    found = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
            raise RequestError(f"logit_bias: keys are token ids below {vocab_size}", param="logit_bias")
        found[int(key)] = value
    return tuple(sorted(found.items()))


def seed_of(body: Generation) -> int | None:
    """The client's seed as 64 unsigned bits."""
    if body.seed is None:
        return None
    if not -(2**63) <= body.seed < 2**64:
        raise RequestError("seed: must fit 64 bits", param="seed")
    return body.seed % 2**64


def stops_of(body: Generation) -> tuple[str, ...]:
    """The stop strings, each once."""
    if body.stop is None:
        return ()
    return (body.stop,) if isinstance(body.stop, str) else tuple(dict.fromkeys(body.stop))


def check_stream_options(body: Generation) -> None:
    """stream_options on a plain answer is a client's mistake, as OpenAI has it."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options: only with stream: true", param="stream_options")


def check_ids(ids: list[int], vocab_size: int, param: str) -> list[int]:
    """Token ids that the model knows; else RequestError(400)."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise RequestError(f"{param}: token ids are between 0 and {vocab_size - 1}", param=param)
    return ids
