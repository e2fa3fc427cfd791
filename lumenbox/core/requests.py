"""What a request is: its parameters and its token ids. Everything else about it can be rebuilt from these.

A `Request` here is ONE sequence of tokens. An HTTP call with n = 3 and two prompts makes six of them.
"""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How the tokens of one request are drawn. All of it is known at arrival and never changes.

    `seed` and `choice` key the counter-based noise together with the position: see DESIGN §9.
    `top_k` 0 means off. `logprobs` -1 means none, else the number of alternatives reported beside the drawn token.
    `end_ids` end the generation (the model's EOS unless ignored, and the client's stop_token_ids); `min_tokens`
    masks all of them.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    end_ids: tuple[int, ...] = ()
    seed: int = 0
    choice: int = 0
    logprobs: int = -1


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    """One drawn token. `logprob` (natural log, of the model's unmodified distribution) is None where not asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
