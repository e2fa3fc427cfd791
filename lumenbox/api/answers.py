"""Plain (not streamed) answers: every choice collected, then sent whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lumenbox.api.metrics import StreamMeter
from lumenbox.api.reply import Reply, usage_of
from lumenbox.coordinator.streams import Stream
from lumenbox.core.requests import Sampled


@dataclass(slots=True)
class Choice:
    """One answer while it grows."""

    text: list[str] = field(default_factory=list)
    tokens: list[Sampled] = field(default_factory=list)
    finish_reason: str | None = None


async def collect(stream: Stream, reply: Reply, meter: StreamMeter) -> list[Choice]:
    """Wait for all choices. Raises RequestError when the stream cannot go on."""
    choices = [Choice() for _ in range(reply.choices)]
    keep_tokens = reply.token_ids or reply.logprobs is not None
    while True:
        try:
            deltas = await stream.next()
        except StopAsyncIteration:
            return choices
        for delta in deltas:
            meter.saw(delta)
            choice = choices[delta.choice]
            choice.text.append(delta.text)
            if keep_tokens:
                choice.tokens += delta.tokens
            choice.finish_reason = delta.finish_reason or choice.finish_reason


def answer_object(reply: Reply, choices: list[Choice], stream: Stream) -> dict[str, Any]:
    """The body of a plain answer."""
    return {
        "id": reply.id,
        "object": "chat.completion" if reply.chat else "text_completion",
        "created": reply.created,
        "model": reply.model,
        "choices": [choice_object(reply, index, choice) for index, choice in enumerate(choices)],
        "usage": usage_of(stream),
    }


def choice_object(reply: Reply, index: int, choice: Choice) -> dict[str, Any]:
    """One entry of `choices`."""
    text = "".join(choice.text)
    body: dict[str, Any] = {"index": index}
    body |= {"message": {"role": "assistant", "content": text}} if reply.chat else {"text": text}
    body |= {"logprobs": reply.logprobs_of(choice.tokens, 0), "finish_reason": choice.finish_reason}
    if reply.token_ids:
        body |= {
            "prompt_token_ids": reply.prompt_of(index),
            "token_ids": [token.token for token in choice.tokens],
        }
    return body
