"""The sampler is a pure function of (parameters, tokens, logits): checked against slow references and by statistics."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lumenbox.core.batching import Sequence
from lumenbox.core.requests import SamplingParams
from lumenbox.engine import sampler

VOCABULARY = 50


def sequence(tokens=(1, 2, 3), num_prompt=2, **params):
    return Sequence(0, 0, SamplingParams(**{"max_tokens": 10, **params}), list(tokens), num_prompt)


def rows(seed, count=1, vocabulary=VOCABULARY, scale=3.0):
    return torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_p": st.sampled_from([1.0, 0.9, 0.3, 1e-9]),
        "top_k": st.sampled_from([0, 1, 5, 49, 50, 99]),
        "min_p": st.sampled_from([0.0, 0.05, 1.0]),
        "presence_penalty": st.sampled_from([0.0, 1.5, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.7]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.8]),
        "logit_bias": st.sampled_from([(), ((4, 5.0), (7, -100.0)), ((999, 1.0),)]),
        "min_tokens": st.sampled_from([0, 1, 5]),
        "end_ids": st.sampled_from([(), (3,), (1, 2, 999)]),
        "seed": st.integers(-(2**63), 2**64 - 1),
        "choice": st.integers(0, 7),
        "logprobs": st.sampled_from([-1, 0, 4, 60]),
    }
)
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(PARAMS, TOKENS), min_size=1, max_size=5), st.integers(0, 2**31))
def test_a_draw_does_not_depend_on_its_neighbours(requests, seed):
    sequences = [sequence(tokens, max(1, len(tokens) // 2), **params) for params, tokens in requests]
    logits = rows(seed, len(sequences))
    together = sampler.sample(sequences, logits)
    alone = [sampler.sample([seq], logits[row : row + 1])[0] for row, seq in enumerate(sequences)]
    assert together == alone


@settings(max_examples=300, deadline=None)
@given(PARAMS, TOKENS, st.integers(0, 2**31))
def test_against_a_slow_reference(params, tokens, seed):
    seq = sequence(tokens, max(1, len(tokens) // 2), **params)
    logits = rows(seed)[0].double().tolist()
    assert sampler.sample([seq], torch.tensor([logits]))[0].token == slow(seq, logits)


def slow(seq, logits):
    params = seq.params
    scores = slow_scores(seq, logits)
    if params.temperature == 0.0:
        return scores.index(max(scores))
    best = max(scores)
    scaled = {token: (score - best) / params.temperature for token, score in enumerate(scores) if score > -math.inf}
    if params.top_k:
        edge = sorted(scaled.values(), reverse=True)[: params.top_k][-1]
        scaled = {token: value for token, value in scaled.items() if value >= edge}
    if params.top_p < 1.0:
        scaled = slow_nucleus(scaled, params.top_p)
    if params.min_p:
        scaled = {token: value for token, value in scaled.items() if value >= math.log(params.min_p)}
    key = sampler.noise_key(params.seed, params.choice, len(seq.tokens))
    keyed = {token: value + slow_gumbel(key, token) for token, value in scaled.items()}
    return max(keyed, key=lambda token: (keyed[token], -token))


def slow_scores(seq, logits):
    params, generated = seq.params, seq.tokens[seq.num_prompt :]
    scores = list(logits)
    for token in set(seq.tokens):
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(generated):
        scores[token] -= params.frequency_penalty * generated.count(token) + params.presence_penalty
    for token, bias in params.logit_bias:
        if token < len(scores):
            scores[token] += bias
    for token in params.end_ids:
        if len(generated) < params.min_tokens and token < len(scores):
            scores[token] = -math.inf
    return scores


def slow_nucleus(scaled, top_p):
    weights = {token: math.exp(value) for token, value in scaled.items()}
    total, mass, kept = sum(weights.values()), 0.0, []
    for token in sorted(weights, key=lambda token: -weights[token]):
        kept.append(token)
        mass += weights[token]
        if mass >= top_p * total:
            break
    return {token: scaled[token] for token in kept}


def slow_gumbel(key, token):
    bits = (token * 0x9E3779B97F4A7C15 + key) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ bits >> shift) * factor % 2**64
    bits ^= bits >> 31
    return -math.log(-math.log(((bits >> 12) + 0.5) * 2.0**-52))


def test_ties_go_to_the_lowest_id():
    logits = torch.zeros(1, VOCABULARY)
    assert sampler.sample([sequence(temperature=0.0)], logits)[0].token == 0
    assert sampler.sample([sequence(temperature=0.0, logprobs=3)], logits)[0].top[0][0] == 0
    logits[0, [9, 5]] = 1.0
    assert sampler.sample([sequence(temperature=0.0)], logits.bfloat16())[0].token == 5


def test_the_noise_follows_seed_choice_and_position_only():
    logits = torch.zeros(1, 5000)
    drawn = {
        (seed, choice, length): sampler.sample([sequence(range(length), length, seed=seed, choice=choice)], logits)[
            0
        ].token
        for seed in (-1, 0, 1, 2**64 - 2)
        for choice in (0, 1)
        for length in (1, 2)
    }
    assert len(set(drawn.values())) == len(drawn)
    assert drawn[-1, 0, 1] == sampler.sample([sequence([7], 1, seed=2**64 - 1)], logits)[0].token  # the same 64 bits


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_the_distribution_is_the_softmax(temperature):
    logits = rows(3, vocabulary=8, scale=1.5)
    expected = torch.softmax(logits[0].double() / temperature, -1).numpy()
    draws = 4000
    tokens = [sampler.sample([sequence(seed=s, temperature=temperature)], logits)[0].token for s in range(draws)]
    counts = np.bincount(tokens, minlength=8)
    assert ((counts - draws * expected) ** 2 / (draws * expected)).sum() < 24.3  # chi-squared, 7 degrees, p = 0.001


def test_noise_is_standard_gumbel():
    noise = sampler.gumbel(sampler.noise_key(1, 0, 0), np.arange(200_000))
    assert abs(noise.mean() - 0.5772) < 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.02


def test_min_tokens_masks_every_end_until_it_is_reached():
    logits = torch.zeros(1, VOCABULARY)
    logits[0, [3, 4]] = 50.0
    params = {"min_tokens": 2, "end_ids": (3, 4), "temperature": 0.0}
    assert sampler.sample([sequence((1, 2), 2, **params)], logits)[0].token == 0
    assert sampler.sample([sequence((1, 2, 9), 2, **params)], logits)[0].token == 0
    assert sampler.sample([sequence((1, 2, 9, 9), 2, **params)], logits)[0].token == 3


def test_logprobs_are_those_of_the_unmodified_distribution():
    logits = rows(5)
    seq = sequence(temperature=0.5, top_k=3, repetition_penalty=1.5, logprobs=4)
    sampled = sampler.sample([seq], logits)[0]
    expected = torch.log_softmax(logits[0].double(), -1)
    assert sampled.logprob == pytest.approx(float(expected[sampled.token]), abs=1e-12)
    assert [token for token, _ in sampled.top] == expected.topk(4).indices.tolist()
    assert [value for _, value in sampled.top] == pytest.approx(expected.topk(4).values.tolist(), abs=1e-12)


def test_extreme_temperatures_and_bias_do_not_break():
    logits = rows(6)
    best = int(logits.argmax())
    assert sampler.sample([sequence(temperature=1e-320)], logits)[0].token == best
    assert 0 <= sampler.sample([sequence(temperature=1e300)], logits)[0].token < VOCABULARY
    bias = tuple((token, -1e9) for token in range(VOCABULARY) if token != 11)
    assert sampler.sample([sequence(logit_bias=bias)], logits)[0].token == 11
