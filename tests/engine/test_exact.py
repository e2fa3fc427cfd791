"""Exact mode: a row's logits depend on its position and its prefix alone, to the last bit.

Histories are random: chunks of random lengths, random neighbours, pages in random order and full of garbage, recompute
after a preemption, prefixes taken from another sequence's pages.
"""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lumenbox.core.batching import Batch, Chunk
from lumenbox.errors import ModelError

from . import tiny

EXACT_KINDS = sorted(set(tiny.CONFIGS) - {"gemma2", "qwen3_moe"})
LENGTH = 150


@pytest.fixture(scope="module")
def exact_models(tmp_path_factory):
    """Loads each (architecture, dtype) once."""
    cache = {}

    def get(kind, dtype):
        if (kind, dtype) not in cache:
            folder = tiny.make(kind, tmp_path_factory.mktemp(kind))
            cache[kind, dtype] = tiny.load(folder, dtype=dtype, exact="on").engine(pages=64)
        return cache[kind, dtype]

    return get


def fresh(engine, rid, tokens, draw):
    """A sequence with its pages, in random order, dirty as a former owner left them."""
    seq = tiny.greedy(rid, tokens)
    taken = draw.sample(sorted(engine.free), -(-len(tokens) // 16))
    engine.free -= set(taken)
    engine.pool.pages[taken] = float("nan")
    seq.page_table = taken
    return seq


def whole_logits(engine, tokens):
    """Logits of every prefix end that the histories below can sample, each computed as one chunk alone."""
    draw = random.Random(0)
    engine.free = set(range(engine.pool.num_pages))
    seq = fresh(engine, 0, tokens, draw)
    logits = engine.logits(Batch([Chunk(seq, 0, len(tokens))]))
    return logits[0], engine.pool.pages[seq.page_table].clone()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_random_histories_keep_bits(kind, dtype, exact_models):
    engine = exact_models(kind, dtype)

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.integers(0, 2**32), st.integers(2, LENGTH))
    def histories(seed, length):
        tokens = tiny.prompt(seed, length)
        logits, pages = whole_logits(engine, tokens)
        again, kept = random_history(engine, tokens, random.Random(seed))
        assert torch.equal(again, logits)
        assert torch.equal(kept, pages)

    histories()


def random_history(engine, tokens, draw):
    """The same tokens in random chunks beside random neighbours, with a preemption and a cache hit on the way."""
    engine.free = set(range(engine.pool.num_pages))
    seq = fresh(engine, 1, tokens, draw)
    others = [fresh(engine, rid, tiny.prompt(draw.random(), draw.randint(1, 200)), draw) for rid in (2, 3, 4)]
    preempt_at = draw.randrange(len(tokens))
    while True:
        chunks = [next_chunk(seq, draw)]
        chunks += [
            next_chunk(o, draw) for o in draw.sample(others, draw.randrange(4)) if o.num_computed < len(o.tokens)
        ]
        draw.shuffle(chunks)
        sampling = [chunk.seq for chunk in chunks if chunk.samples]
        logits = engine.logits(Batch(chunks))
        for chunk in chunks:
            chunk.seq.num_computed += chunk.length
        if seq in sampling:
            return logits[sampling.index(seq)], engine.pool.pages[seq.page_table].clone()
        if seq.num_computed > preempt_at:
            preempt_at = len(tokens)
            seq = reborn(engine, seq, draw)


def next_chunk(seq, draw):
    left = len(seq.tokens) - seq.num_computed
    return Chunk(seq, seq.num_computed, min(left, draw.choice((1, 1, 2, 3, 7, 16, 40, 100))))


def reborn(engine, seq, draw):
    """The sequence on other pages; some of its whole pages are found in the prefix cache, the rest is lost."""
    new = fresh(engine, seq.rid, seq.tokens, draw)
    hit = draw.randint(0, (seq.num_computed - 1) // 16)
    new.page_table[:hit] = seq.page_table[:hit]
    new.num_computed = hit * 16
    return new


def test_copied_page_goes_on_with_the_same_bits(exact_models):
    engine = exact_models("llama", "bfloat16")
    tokens = tiny.prompt(5, 41)
    logits, _ = whole_logits(engine, tokens)
    draw = random.Random(1)
    engine.free = set(range(engine.pool.num_pages))
    seq = fresh(engine, 1, tokens, draw)
    engine.logits(Batch([Chunk(seq, 0, 40)]))
    spare = engine.free.pop()
    engine.pool.pages[spare] = float("nan")
    engine.pool.copy_page(seq.page_table[2], spare, 8)
    seq.page_table[2] = spare
    assert torch.equal(engine.logits(Batch([Chunk(seq, 40, 1)]))[0], logits)


def test_exact_on_is_refused_where_it_is_not_proved(tmp_path):
    with pytest.raises(ModelError, match="experts"):
        tiny.load(tiny.make("qwen3_moe", tmp_path), exact="on")


def test_identity_tells_numerics_and_weights_apart(llama_folder, tmp_path):
    other = tiny.make("llama", tmp_path / "other", rms_norm_eps=1e-5)
    reports = [
        tiny.load(llama_folder).report,
        tiny.load(llama_folder, exact="off").report,
        tiny.load(llama_folder, dtype="bfloat16").report,
        tiny.load(llama_folder, page_size=32).report,
        tiny.load(other).report,
    ]
    assert len({report.identity for report in reports}) == len(reports)
    assert tiny.load(llama_folder).report.identity == reports[0].identity
