"""Tiny models of every supported architecture, made from a seed, and a driver that runs sequences through an engine."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from lumenbox.core.batching import Batch, Chunk, Sequence
from lumenbox.core.requests import SamplingParams
from lumenbox.engine import architecture, loader, model
from lumenbox.memory import segment
from lumenbox.memory.layout import LoadReport

VOCABULARY = 384
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,  # wide, so that a lost or foreign page changes the text
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_tied": (
        "LlamaConfig",
        {"tie_word_embeddings": True, "hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3},
    ),
    "smollm3": ("SmolLM3Config", {"layer_types": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "qwen3_moe": ("Qwen3MoeConfig", MIXTURE),
    "mistral": ("MistralConfig", {"sliding_window": 24}),
    "gemma2": ("Gemma2Config", {"sliding_window": 24, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 24, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2}),
    "phi3": ("Phi3Config", {}),
    "olmo2": ("Olmo2Config", {}),
}


def make(kind: str, folder: Path, **changes: Any) -> Path:
    """Save a model of this kind with random weights into `folder`."""
    name, own = CONFIGS[kind]
    config = getattr(transformers, name)(**{**COMMON, **own, **changes})
    torch.manual_seed(7)
    with architecture.quiet():
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def reference(folder: Path, dtype: str = "float32") -> Any:
    """transformers' own model of the folder."""
    with architecture.quiet():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


@dataclass
class Loaded:
    """A loaded model, as the processes of a box hold it."""

    folder: Path
    report: LoadReport
    weight_fd: int

    def engine(self, pages: int = 512) -> model.Engine:
        fd = segment.create("test-pool", pages * self.report.page.page_bytes)
        try:
            return model.build(self.report, self.folder, self.weight_fd, fd)
        finally:
            os.close(fd)


def load(folder: Path, **options: Any) -> Loaded:
    fds: list[int] = []

    def allocate(size: int) -> int:
        fds.append(segment.create("test-weights", size))
        return fds[0]

    return Loaded(folder, loader.load(folder, allocate, **options), fds[0])


def greedy(rid: int, tokens: list[int], **params: Any) -> Sequence:
    settings = SamplingParams(**{"max_tokens": 64, "temperature": 0.0, **params})
    return Sequence(rid, 0, settings, list(tokens), len(tokens))


def prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCABULARY) for _ in range(length)]


@dataclass
class Driver:
    """Gives pages out, runs steps, appends what was drawn: a scheduler for tests."""

    engine: model.Engine
    free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = list(range(self.engine.pool.num_pages))

    def chunk(self, seq: Sequence, length: int) -> Chunk:
        """The next `length` positions of `seq`, pages taken."""
        stop = min(seq.num_computed + length, len(seq.tokens))
        while len(seq.page_table) * self.engine.pool.page_size < stop:
            seq.page_table.append(self.free.pop())
        return Chunk(seq, seq.num_computed, stop - seq.num_computed)

    def step(self, chunks: list[Chunk]) -> None:
        """Run one step and commit it."""
        sampling = [chunk.seq for chunk in chunks if chunk.samples]
        drawn = self.engine.execute(Batch(chunks))
        for chunk in chunks:
            chunk.seq.num_computed += chunk.length
        for seq, sampled in zip(sampling, drawn, strict=True):
            seq.tokens.append(sampled.token)

    def run(self, sequences: list[Sequence], new_tokens: int, chunk: int) -> None:
        """Decodes first, then chunked prefill, until every sequence has its tokens."""
        while open_ := [seq for seq in sequences if seq.num_generated < new_tokens]:
            self.step(sorted((self.chunk(seq, chunk) for seq in open_), key=lambda c: c.length))
