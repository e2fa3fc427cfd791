"""Drawn tokens → OpenAI's two forms of logprobs: chat's list of objects and completions' four parallel lists."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Any

from lumenbox.core.requests import Sampled

LEAST = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot say


class LogprobForms:
    """Knows each token's bytes; holds nothing of a request."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes

    def chat(self, tokens: Sequence[Sampled]) -> dict[str, Any]:
        """`choices[].logprobs` of a chat answer or chunk."""
        return {"content": [self._chat_token(token) for token in tokens], "refusal": None}

    def completion(self, tokens: Sequence[Sampled], offset: int) -> dict[str, Any]:
        """`choices[].logprobs` of a completion; `offset` is the number of characters of the choice sent before."""
        offsets = []
        decoder = getincrementaldecoder("utf-8")("replace")
        for token in tokens:
            offsets.append(offset)
            offset += len(decoder.decode(self._bytes(token.token)))
        return {
            "text_offset": offsets,
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "tokens": [self._text(token.token) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
        }

    def _chat_token(self, token: Sampled) -> dict[str, Any]:
        top = [self._entry(other, logprob) for other, logprob in token.top]
        return {**self._entry(token.token, token.logprob), "top_logprobs": top}

    def _entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        raw = self._bytes(token_id)
        return {"token": raw.decode("utf-8", errors="replace"), "logprob": finite(logprob), "bytes": list(raw)}

    def _top(self, token: Sampled) -> dict[str, float]:
        """The alternatives and the drawn token, which may be one of them."""
        pairs = [*token.top, (token.token, token.logprob)]
        return {self._text(token_id): finite(logprob) for token_id, logprob in pairs}

    def _text(self, token_id: int) -> str:
        return self._bytes(token_id).decode("utf-8", errors="replace")

    def _bytes(self, token_id: int) -> bytes:
        return self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""


def finite(logprob: float | None) -> float:
    """A logprob that JSON can carry."""
    return LEAST if logprob is None else max(logprob, LEAST)
