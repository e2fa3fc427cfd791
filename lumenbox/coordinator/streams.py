"""What the HTTP side sees of a generation: a specification goes in, deltas come out.

The only seam between `api` and the rest of the coordinator; api tests put a fake of a few lines behind it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from lumenbox.coordinator.figures import Figures
from lumenbox.core.requests import Sampled, SamplingParams


@dataclass(slots=True, frozen=True)
class GenerationSpec:
    """One HTTP call after validation and tokenising.

    `prompts` holds the token ids of each prompt; each is continued `n` times, so choice i belongs to prompt i // n.
    `params.seed` is ignored when `seed` is None: the box then draws one. `params.choice` is set per choice.
    """

    prompts: list[list[int]]
    params: SamplingParams
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    priority: int = 0


@dataclass(slots=True, frozen=True)
class Delta:
    """What one choice gained. `tokens` are those whose text is released with it (logprobs inside, if asked for).

    `finish_reason` (stop, length) stands in the choice's last delta only.
    """

    choice: int
    text: str
    tokens: list[Sampled]
    finish_reason: str | None = None


class Stream(Protocol):
    """The live answer to one GenerationSpec. Exactly one consumer; `close()` must be called, whatever happens."""

    prompt_tokens: int
    completion_tokens: int
    """Counts of the failure-free run; final once every choice has finished."""
    cached_tokens: int
    """Prompt tokens that the prefix cache spared."""
    recoveries: int
    """How often the stream changed its worker because of a failure or a planned move."""

    async def next(self) -> list[Delta]:
        """Wait for news. An empty list means ten silent seconds: write a keep-alive comment.

        Raises StopAsyncIteration after the last delta, RequestError when the stream cannot go on.
        """
        ...

    def close(self) -> None:
        """Free what the stream still holds on the box. Does nothing after a normal end. Never blocks."""
        ...


@dataclass(slots=True, frozen=True)
class ModelInfo:
    """What the API tells about the served model."""

    name: str
    max_model_len: int
    """Longest prompt + answer in tokens: the least of the model's context, the flag, and the KV pool."""
    vocab_size: int
    created: int = field(default=0)


class Service(Protocol):
    """The box as the HTTP side sees it."""

    @property
    def info(self) -> ModelInfo:
        """What is served; `max_model_len` is final once the box is ready."""
        ...

    @property
    def figures(self) -> Figures:
        """What was counted of failures and recoveries."""
        ...

    def submit(self, spec: GenerationSpec) -> Stream:
        """Take a request into the queue, at once. Raises RequestError (429 full, 503 loading, draining, no worker)."""
        ...

    def state(self) -> dict[str, Any]:
        """The document of `status --json` (CONTRACT §2)."""
        ...
