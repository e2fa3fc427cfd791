"""From a row of logits to a token: a pure function of (parameters, tokens, logits).

The draw is Gumbel-max over counter-based noise (DESIGN §9): argmax over tokens of logit / T + g(seed, choice, position,
token), in float64, ties to the lowest id. The same token comes out wherever, whenever and beside whomever it is drawn.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence as Rows
from typing import Any

import numpy as np
import torch

from lumenbox.core.batching import Sequence
from lumenbox.core.requests import Sampled, SamplingParams

FloatRow = np.ndarray[Any, np.dtype[np.float64]]
IdRow = np.ndarray[Any, np.dtype[np.int64]]


def sample(sequences: Rows[Sequence], logits: torch.Tensor) -> list[Sampled]:
    """Draw the next token of each sequence from its row of `logits` [rows, vocabulary]."""
    plain = [row for row, seq in enumerate(sequences) if is_plain_greedy(seq)]
    drawn: dict[int, Sampled] = {}
    if plain:
        chosen = logits if len(plain) == len(sequences) else logits[plain]
        drawn = {row: Sampled(token) for row, token in zip(plain, chosen.argmax(-1).tolist(), strict=True)}
    for row, seq in enumerate(sequences):
        if row not in drawn:
            drawn[row] = draw(seq, logits[row].double().numpy())
    return [drawn[row] for row in range(len(sequences))]


def is_plain_greedy(seq: Sequence) -> bool:
    """Nothing but the largest logit is asked for, so that all such rows share one argmax."""
    params = seq.params
    neutral = params.presence_penalty == params.frequency_penalty == 0.0 and params.repetition_penalty == 1.0
    return (
        params.temperature == 0.0
        and neutral
        and not params.logit_bias
        and params.logprobs < 0
        and seq.num_generated >= params.min_tokens
    )


def draw(seq: Sequence, logits: FloatRow) -> Sampled:
    """The next token of `seq`, with its log-probabilities where asked for."""
    token = choose(seq.params, len(seq.tokens), shape(seq, logits))
    return Sampled(token) if seq.params.logprobs < 0 else with_logprobs(token, seq.params.logprobs, logits)


def shape(seq: Sequence, logits: FloatRow) -> FloatRow:
    """Penalties, bias and the mask of end tokens, in this order, on a copy of the row."""
    params, scores = seq.params, logits.copy()
    if (penalty := params.repetition_penalty) != 1.0:
        seen = np.unique(np.asarray(seq.tokens, np.int64))
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
    if params.frequency_penalty or params.presence_penalty:
        tokens, counts = np.unique(np.asarray(seq.tokens[seq.num_prompt :], np.int64), return_counts=True)
        scores[tokens] -= params.frequency_penalty * counts + params.presence_penalty
    for token, bias in params.logit_bias:
        if token < len(scores):
            scores[token] += bias
    if seq.num_generated < params.min_tokens:
        scores[[token for token in params.end_ids if token < len(scores)]] = -np.inf
    return scores


def choose(params: SamplingParams, position: int, scores: FloatRow) -> int:
    """The token at `position` (its index in the sequence) from processed scores."""
    if params.temperature == 0.0:
        return int(scores.argmax())
    with np.errstate(over="ignore"):  # a tiny temperature makes all but the best -inf, as it should
        scaled = (scores - scores.max()) / params.temperature
    kept = keep(params, scaled)
    noise = gumbel(noise_key(params.seed, params.choice, position), kept)
    return int(kept[(scaled[kept] + noise).argmax()])


def keep(params: SamplingParams, scaled: FloatRow) -> IdRow:
    """Ids, ascending, that top-k, top-p and min-p leave. Tokens that tie at an edge all stay."""
    kept = np.flatnonzero(scaled > -np.inf)
    if 0 < params.top_k < len(kept):
        edge = np.partition(scaled[kept], len(kept) - params.top_k)[len(kept) - params.top_k]
        kept = kept[scaled[kept] >= edge]
    if params.top_p < 1.0:
        kept = kept[nucleus(np.exp(scaled[kept]), params.top_p)]
    if params.min_p > 0.0:
        kept = kept[scaled[kept] >= np.log(params.min_p)]  # the best token stands at 0
    return kept


def nucleus(weights: FloatRow, top_p: float) -> IdRow:
    """Indices of the fewest largest `weights` whose sum reaches `top_p` of the total; never none.

    What weighs less than an equal share of the tail can only lie in the tail, so most tokens never meet the sort.
    """
    total = weights.sum()
    heavy = np.flatnonzero(weights >= (1.0 - top_p) * total / len(weights))
    ordered = np.sort(weights[heavy])[::-1]
    last = int(np.searchsorted(ordered.cumsum(), top_p * total))
    return heavy[weights[heavy] >= ordered[min(last, len(ordered) - 1)]]


def noise_key(seed: int, choice: int, position: int) -> int:
    """64 bits that stand for one draw. `seed` is any integer in [-2^63, 2^64)."""
    packed = struct.pack("<QQQ", seed % 2**64, choice, position)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def gumbel(key: int, tokens: IdRow) -> FloatRow:
    """Standard Gumbel noise for each token: the finaliser of splitmix64 over key + token, 52 bits, never 0 or 1."""
    bits = tokens.astype(np.uint64)
    bits *= np.uint64(0x9E3779B97F4A7C15)
    bits += np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits ^= bits >> np.uint64(shift)
        bits *= np.uint64(factor)
    bits ^= bits >> np.uint64(31)
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return np.asarray(-np.log(-np.log(uniform)))


def with_logprobs(token: int, count: int, logits: FloatRow) -> Sampled:
    """Log-probabilities of the unmodified distribution: the drawn token's, and the `count` largest (ties by id)."""
    shifted = logits - logits.max()
    norm = np.log(np.exp(shifted).sum())
    best = largest(shifted, count)
    return Sampled(token, float(shifted[token] - norm), tuple((int(i), float(shifted[i] - norm)) for i in best))


def largest(values: FloatRow, count: int) -> IdRow:
    """Indices of the `count` largest values, descending, ties by the lower index."""
    count = min(count, len(values))
    if count == 0:
        return np.empty(0, np.int64)
    edge = np.partition(values, len(values) - count)[len(values) - count]
    candidates = np.flatnonzero(values >= edge)
    return candidates[np.lexsort((candidates, -values[candidates]))][:count]
