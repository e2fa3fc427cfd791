"""Greedy float32 output equals transformers' `generate` for every architecture, chunked prefill beside decodes."""

import pytest
import torch

from . import tiny

PROMPTS = [tiny.prompt(seed, length) for seed, length in enumerate((1, 5, 16, 17, 33, 48, 70, 90))]
NEW_TOKENS = 12


@pytest.mark.parametrize("exact", ["on", "off"])
@pytest.mark.parametrize("kind", tiny.CONFIGS)
def test_greedy_equals_generate(kind, exact, tmp_path):
    folder = tiny.make(kind, tmp_path / kind)
    loaded = tiny.load(folder, dtype="float32", exact="auto" if exact == "on" else "off")
    assert loaded.report.exact == (exact == "on" and kind not in ("qwen3_moe", "gemma2"))
    sequences = [tiny.greedy(rid, tokens) for rid, tokens in enumerate(PROMPTS)]
    tiny.Driver(loaded.engine()).run(sequences, NEW_TOKENS, chunk=7)
    model = tiny.reference(folder)
    for seq, tokens in zip(sequences, PROMPTS, strict=True):
        wanted = model.generate(torch.tensor([tokens]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
        assert seq.tokens == wanted[0].tolist()


def test_what_cannot_be_exact_says_so(tmp_path):
    for kind, word in (("qwen3_moe", "experts"), ("gemma2", "softcap")):
        report = tiny.load(tiny.make(kind, tmp_path / kind)).report
        assert not report.exact
        assert word in report.inexact_reason


def test_a_plain_call_raises(tmp_path):
    loaded = tiny.load(tiny.make("llama", tmp_path))
    with pytest.raises(RuntimeError, match="KV pages"):
        loaded.engine().model(torch.tensor([[1, 2, 3]]))
