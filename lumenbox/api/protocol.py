"""Request bodies of the HTTP API, and how bytes become one of them.

Types and ranges stand in the annotations, so the checks and the OpenAPI document have one source. What needs the
model (its vocabulary, its context) is checked in `sampling` and `prompts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from lumenbox.api.problems import clip
from lumenbox.api.unsupported import FIELDS, refuse_unsupported
from lumenbox.errors import RequestError

MAX_STOPS = 4
Count = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Alternatives = Annotated[int, Meta(ge=0, le=20)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]


class StreamOptions(msgspec.Struct):
    """Which usage numbers a stream carries."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Generation(msgspec.Struct, kw_only=True):
    """What both generating calls share. null means the default, everywhere."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=8)] | None = None
    seed: int | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=128)] | None = None
    include_stop_str_in_output: bool | None = None
    max_tokens: Count | None = None
    min_tokens: Natural | None = None
    ignore_eos: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31)] | None = None
    user: str | None = None


class TextPart(msgspec.Struct):
    """One part of a message's content; parts of other types are refused by name."""

    type: str
    text: str | None = None


class Message(msgspec.Struct):
    """One turn of a conversation."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatBody(Generation, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(Generation, kw_only=True):
    """POST /v1/completions. A prompt is text or token ids; a list of either makes as many answers."""

    prompt: str | list[str | int | list[int]]
    logprobs: Alternatives | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: `prompt` or `messages`, as vLLM has it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


Body = TypeVar("Body", ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)


@dataclass(slots=True, frozen=True)
class Decoded(Generic[Body]):
    """A well-formed body, and the names of its fields that mean nothing to us."""

    body: Body
    ignored: list[str]


def decode(data: bytes, kind: type[Body]) -> Decoded[Body]:
    """Parse a request body. Raises RequestError(400) that names the field where there is one."""
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        body = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise invalid(str(error)) from None
    except msgspec.DecodeError as error:
        raise RequestError(f"the body is not valid JSON: {clip(str(error))}", code="invalid_json") from None
    except UnicodeDecodeError:
        raise RequestError("the body is not valid UTF-8", code="invalid_json") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply", code="invalid_json") from None
    refuse_unsupported(fields)
    known = FIELDS.union(kind.__struct_fields__)
    return Decoded(body, [name for name in fields if name not in known])


def invalid(message: str) -> RequestError:
    """msgspec's complaint "what - at `$.path`" as an error whose param is the path."""
    what, _, where = message.partition(" - at `$")
    param = where.rstrip("`").lstrip(".") or None
    if what.startswith("Object missing required field"):
        missing = what.split("`")[1]
        param = f"{param}.{missing}" if param else missing
    return RequestError(f"{param or 'body'}: {clip(what)}", param=param)
