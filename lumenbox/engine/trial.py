"""An architecture that lumenbox's tests do not cover is tried once at load: paged and plain forward must agree."""

from __future__ import annotations

from typing import Any

import torch

from lumenbox.core.batching import Batch, Chunk
from lumenbox.engine import architecture
from lumenbox.engine.attention import ATTENTION_NAME
from lumenbox.engine.model import Engine
from lumenbox.engine.scratch import ScratchPool
from lumenbox.errors import ModelError
from lumenbox.memory.layout import PageLayout

TESTED = frozenset(  # by tests/engine/test_architectures.py
    ("llama", "smollm3", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma2", "gemma3_text", "phi3", "olmo2")
)
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}  # of the logits' spread


def try_unknown(model: Any, page: PageLayout) -> None:
    """Refuse a model whose paged logits are not its plain ones; costs two short forwards, for untested kinds only."""
    kind = model.config.model_type
    if kind in TESTED:
        return
    try:
        error = disagreement(model, page)
    except Exception as failure:  # foreign code, tried for the first time
        reason = architecture.first_line(failure)
        raise ModelError(f"config.json: {kind} is refused: it does not run over KV pages ({reason})") from failure
    if not error <= TOLERANCE[model.dtype]:
        raise ModelError(f"config.json: {kind} is refused: over KV pages its logits are off by {error:.1%}")


@torch.inference_mode()
def disagreement(model: Any, page: PageLayout, length: int = 40) -> float:
    """The largest difference between paged (in two chunks) and plain logits, as a share of the logits' deviation."""
    pool = ScratchPool(page, length)
    seq = pool.sequence(length, model.config.vocab_size, seed=1)
    engine = Engine(model, pool, exact=False, min_rows=1)
    engine.logits(Batch([Chunk(seq, 0, length - 7)]))
    paged = engine.logits(Batch([Chunk(seq, length - 7, 7)]))[0].float()
    try:
        model.set_attn_implementation("eager")
        plain = model(torch.tensor([seq.tokens]), use_cache=False).logits[0, -1].float()
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    return float((paged - plain).abs().max() / plain.std())
