"""What an answer is called and how it is shaped: the one difference between chat and plain completions."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any

from lumenbox.api.logprobs import LogprobForms
from lumenbox.api.protocol import ChatBody, CompletionBody
from lumenbox.coordinator.streams import GenerationSpec, Stream
from lumenbox.core.requests import Sampled


@dataclass(slots=True, frozen=True)
class Reply:
    """The identity and the wanted extras of one answer; constant from its first byte to its last."""

    id: str
    created: int
    model: str
    chat: bool
    spec: GenerationSpec
    logprobs: LogprobForms | None
    token_ids: bool
    include_usage: bool
    continuous_usage: bool

    @property
    def choices(self) -> int:
        """How many answers the call has asked for, over all its prompts."""
        return len(self.spec.prompts) * self.spec.n

    def prompt_of(self, choice: int) -> list[int]:
        """The prompt's token ids behind a choice."""
        return self.spec.prompts[choice // self.spec.n]

    def logprobs_of(self, tokens: list[Sampled], offset: int) -> dict[str, Any] | None:
        """`logprobs` of a choice, None where not asked for."""
        if self.logprobs is None:
            return None
        return self.logprobs.chat(tokens) if self.chat else self.logprobs.completion(tokens, offset)


def reply_for(body: ChatBody | CompletionBody, spec: GenerationSpec, model: str, forms: LogprobForms) -> Reply:
    """Name a new answer."""
    chat = isinstance(body, ChatBody)
    options = body.stream_options
    return Reply(
        id=f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=model,
        chat=chat,
        spec=spec,
        logprobs=forms if spec.params.logprobs >= 0 else None,
        token_ids=bool(body.return_token_ids),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
    )


def usage_of(stream: Stream, so_far: int | None = None) -> dict[str, int]:
    """Token counts of the failure-free run. `so_far` replaces the answer's count, which is final only at the end."""
    prompt = stream.prompt_tokens
    completion = stream.completion_tokens if so_far is None else so_far
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
