"""Deltas → server-sent events, byte for byte as CONTRACT §3 has them.

A content chunk is a precomputed head, the text as JSON, and a precomputed tail: no dict is built per token unless
the client asked for logprobs, token ids or running usage.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from lumenbox.api.problems import error_object
from lumenbox.api.reply import Reply, usage_of
from lumenbox.coordinator.streams import Delta, Stream
from lumenbox.errors import RequestError

HEARTBEAT = b": hb\n"
"""One newline: with a blank line the comment becomes an empty event, which crashes a widespread client."""
DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode


class Chunks:
    """The events of one stream."""

    def __init__(self, reply: Reply, stream: Stream) -> None:
        self._reply = reply
        self._stream = stream
        self._left = reply.choices
        self._sent_chars: dict[int, int] = {}
        self._seen_tokens = 0
        kind = "chat.completion.chunk" if reply.chat else "text_completion"
        base = {"id": reply.id, "object": kind, "created": reply.created, "model": reply.model}
        self._start = b"data: " + encode(base)[:-1] + b',"choices":['
        self._open, self._close = (b'"delta":{"content":', b"}") if reply.chat else (b'"text":', b"")
        self._heads = [self._start + b'{"index":%d,' % i + self._open for i in range(reply.choices)]
        self._usage = b',"usage":null' if reply.include_usage else b""
        self._tail = self._close + b',"logprobs":null,"finish_reason":null}]' + self._usage + b"}\n\n"
        self._plain = reply.logprobs is None and not reply.token_ids and not reply.continuous_usage

    def events(self, delta: Delta) -> Iterator[bytes]:
        """The events of one delta: its text, before it the role where the choice begins."""
        first = delta.choice not in self._sent_chars
        if first:
            self._sent_chars[delta.choice] = 0
            if self._reply.chat:
                yield self._opening(delta.choice)
        if self._plain and delta.finish_reason is None:
            if delta.text:
                yield self._heads[delta.choice] + encode(delta.text) + self._tail
        elif delta.text or delta.tokens or delta.finish_reason:
            yield self._full(delta, first)

    def ending(self) -> Iterator[bytes]:
        """What follows the last delta."""
        if self._reply.include_usage:
            extra = encode({"usage": usage_of(self._stream), **self._recovered()})
            yield self._start + b"]," + extra[1:] + b"\n\n"
        yield DONE

    def _opening(self, choice: int) -> bytes:
        """The role chunk; a completion has none."""
        body: dict[str, Any] = {"index": choice, "delta": {"role": "assistant", "content": ""}}
        body |= {"logprobs": None, "finish_reason": None}
        if self._reply.token_ids:
            body |= {"prompt_token_ids": self._reply.prompt_of(choice), "token_ids": []}
        return self._event(body)

    def _full(self, delta: Delta, first: bool) -> bytes:
        """A chunk with everything that was asked for."""
        reply, choice, offset = self._reply, delta.choice, self._sent_chars[delta.choice]
        body: dict[str, Any] = {"index": choice}
        if reply.chat:
            body["delta"] = {"content": delta.text} if delta.text else {}
        else:
            body["text"] = delta.text
        body["logprobs"] = reply.logprobs_of(delta.tokens, offset) if delta.tokens else None
        body["finish_reason"] = delta.finish_reason
        if reply.token_ids:
            body["token_ids"] = [token.token for token in delta.tokens]
            if first and not reply.chat:
                body["prompt_token_ids"] = reply.prompt_of(choice)
        self._sent_chars[choice] = offset + len(delta.text)
        self._seen_tokens += len(delta.tokens)
        if delta.finish_reason is None:
            return self._event(body)
        self._left -= 1
        return self._event(body, last=self._left == 0)

    def _event(self, body: dict[str, Any], *, last: bool = False) -> bytes:
        usage = self._usage
        if self._reply.continuous_usage:
            usage = b',"usage":' + encode(usage_of(self._stream, self._seen_tokens))
        if last and not self._reply.include_usage:
            usage += b"," + encode(self._recovered())[1:-1] if self._stream.recoveries else b""
        return self._start + encode(body) + b"]" + usage + b"}\n\n"

    def _recovered(self) -> dict[str, Any]:
        recoveries = self._stream.recoveries
        return {"lumenbox": {"recoveries": recoveries}} if recoveries else {}


def error_event(problem: RequestError) -> bytes:
    """The end of a stream that cannot go on: after it no finish_reason and no [DONE]."""
    return b"data: " + encode(error_object(problem)) + b"\n\n"
