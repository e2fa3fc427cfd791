"""tiny-random: the same everywhere, sound, never ends by itself, printable, and quick to show a lost page."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lumenbox.models import tiny
from lumenbox.models.catalogue import catalogue
from lumenbox.models.facts import check
from lumenbox.models.sources import SeedSource
from lumenbox.models.tokenizer import Tokenizer

PROMPTS = [f"{word} {i}" for i, word in enumerate(("the sea", "日本", "hello " * 30, "x", "why is it so"))]


def test_digest_is_the_catalogues(tmp_path: Path) -> None:
    (source,) = catalogue().entries["tiny-random"].sources
    assert isinstance(source, SeedSource)
    assert tiny.make(tmp_path, source.seed) == source.sha256


def test_another_seed_is_another_model(tmp_path: Path) -> None:
    (source,) = catalogue().entries["tiny-random"].sources
    assert isinstance(source, SeedSource)
    assert tiny.make(tmp_path, source.seed + 1) != source.sha256


def test_folder_is_sound(tiny_dir: Path, tiny_tokenizer: Tokenizer) -> None:
    facts = check(tiny_dir)
    assert (facts.context_length, facts.vocab_size, facts.dtype, facts.layers) == (8192, 512, "F32", 4)
    assert facts.has_chat_template
    assert set(tiny_tokenizer.eos_ids) == {462, 464}


@cache
def loaded(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def generate(folder: Path, ids: list[int], count: int, seed: int | None = None) -> list[int]:
    """`count` new ids, greedy or at temperature 1; ends only by itself."""
    import torch

    sampled: dict[str, Any] = {"do_sample": seed is not None} | ({"top_k": 0} if seed is not None else {})
    torch.manual_seed(seed or 0)
    prompt = torch.tensor([ids])
    out = loaded(folder).generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, pad_token_id=462, **sampled
    )
    return [int(token) for token in out[0, len(ids) :]]


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_text_is_printable_varied_and_endless(tiny_dir: Path, tiny_tokenizer: Tokenizer, seed: int | None) -> None:
    texts = set()
    for prompt in PROMPTS:
        ids = generate(tiny_dir, tiny_tokenizer.encode_chat([{"role": "user", "content": prompt}]), 150, seed)
        text = tiny_tokenizer.decode(ids)
        assert len(ids) == 150
        assert not tiny_tokenizer.special_ids & set(ids)
        assert text.rstrip("\ufffd").isprintable(), text
        assert "\ufffd" not in text[:-1], text
        assert len(set(ids[:100])) >= 30, text
        texts.add(text)
    assert len(texts) == len(PROMPTS)


def test_banned_rows_are_far_below_whatever_the_context(tiny_dir: Path) -> None:
    """The ban is a constant of the construction: no row that must not be drawn comes near one that may."""
    import torch

    vocabulary, _ = tiny.make_vocabulary()
    drawn = [i for token, i in vocabulary.items() if tiny.printable(token)]
    banned = sorted(set(range(tiny.VOCAB)) - set(vocabulary.values()) | {0, 10, 27})
    with torch.no_grad():
        ids = torch.randint(0, tiny.VOCAB, (4, 500), generator=torch.Generator().manual_seed(3))
        logits = loaded(tiny_dir)(input_ids=ids, use_cache=False).logits
    assert (logits[..., banned].amax(-1) < logits[..., drawn].amax(-1) - 15).all()


def test_a_token_far_back_matters_soon(tiny_dir: Path) -> None:
    ids = [32 + (i * i * 7 + i) % 94 for i in range(340)]
    for at in range(30, 36):
        changed = [*ids[:at], 32 + (ids[at] - 32 + 11) % 94, *ids[at + 1 :]]
        assert generate(tiny_dir, ids, 40) != generate(tiny_dir, changed, 40), at
