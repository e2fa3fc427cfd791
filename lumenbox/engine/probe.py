"""Exact mode is kernel luck, so it is proved at start over the model's own shapes.

Three proofs, from small to whole: matrix products keep a row's bits from some row count on; attention keeps them at
long extents, alone or batched; the whole model writes the same KV and logits for the same tokens however they are cut.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import linear

from lumenbox.core.batching import Batch, Chunk, Sequence
from lumenbox.engine import architecture
from lumenbox.engine.attention import paged_attention
from lumenbox.engine.kv_pool import KvPool
from lumenbox.engine.model import Engine
from lumenbox.engine.scratch import ScratchPool
from lumenbox.engine.steps import ROWS, Rule, Step
from lumenbox.memory.layout import PageLayout

ROW_COUNTS = (4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 31, 33)
MANY_ROWS = 512  # the token budget of a step on CPU
VOCABULARY_ROWS = 34  # of the output layer, by far the widest: enough for every count above
CANDIDATES = (4, 8, 16, 32)  # not fewer: kernels for 1 to 3 rows differ in one row of ten, which a sample may miss
PLACES = 4  # where among the rows a count is tried
LONG = 1100  # tokens: beyond two of the attention kernel's 512-key tiles


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether bits are kept, from how many rows on, and if not, why not."""

    exact: bool
    min_rows: int
    reason: str = ""


@torch.inference_mode()
def prove(model: Any, page: PageLayout) -> Verdict:
    """Run all proofs on a model that is bound to its weights."""
    if reason := refusal(model.config, page):
        return Verdict(False, 1, reason)
    min_rows = smallest_row_count(model)
    if min_rows is None:
        return Verdict(False, 1, "matrix products change a row's bits with the number of rows")
    rule = Rule(page.page_size, True, min_rows)
    for window in windows(model):
        if not attention_keeps_bits(model, page, rule, window):
            return Verdict(False, 1, f"attention changes bits with the batch (sliding window {window})")
    if not model_keeps_bits(model, page, min_rows):
        return Verdict(False, 1, "the whole model changes bits with the cut of its input")
    return Verdict(True, min_rows)


def refusal(config: Any, page: PageLayout) -> str:
    """Why exactness is not even tried, or nothing."""
    if architecture.is_mixture(config):
        return "mixture of experts: the rows of an expert depend on the neighbours"
    if getattr(config, "attn_logit_softcapping", None):
        return "softcapped attention has no fused kernel whose bits are proved"
    if page.page_size % ROWS:
        return f"page size {page.page_size} is no multiple of {ROWS}"
    return ""


def smallest_row_count(model: Any) -> int | None:
    """The fewest rows from which on every linear layer's rows keep their bits, for any count and place; or None."""
    worst = max(_largest_failing_count(module) for module in _distinct_linears(model))
    return next((count for count in CANDIDATES if count > worst), None)


def _distinct_linears(model: Any) -> Iterator[torch.nn.Linear]:
    seen: set[tuple[torch.Size, bool]] = set()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            shape = (module.weight.shape, module.bias is not None)
            if shape not in seen:
                seen.add(shape)
                yield module


def _largest_failing_count(module: torch.nn.Linear) -> int:
    """The largest of the tried row counts at which a row's bits differ from those in a large product; 0 if none."""
    many = VOCABULARY_ROWS if module.out_features > 8 * module.in_features else MANY_ROWS
    generator = torch.Generator().manual_seed(module.out_features)
    rows = torch.randn(many, module.in_features, generator=generator).to(module.weight.dtype)
    whole = linear(rows, module.weight, module.bias)
    failing = [count for count in ROW_COUNTS if count < many and not _same_rows(module, rows, whole, count)]
    return max(failing, default=0)


def _same_rows(module: torch.nn.Linear, rows: torch.Tensor, whole: torch.Tensor, count: int) -> bool:
    starts = [(7 * count * place) % (len(rows) - count) for place in range(PLACES)]
    parts = [linear(rows[start : start + count].clone(), module.weight, module.bias) for start in starts]
    return all(torch.equal(part, whole[s : s + count]) for part, s in zip(parts, starts, strict=True))


def windows(model: Any) -> list[int | None]:
    """The sliding windows of the model's layers, as they reach our attention."""
    found = {getattr(module, "sliding_window", None) for module in model.modules() if hasattr(module, "layer_idx")}
    return sorted(found, key=lambda window: window or 0)


def attention_keeps_bits(model: Any, page: PageLayout, rule: Rule, window: int | None) -> bool:
    """One layer over a long context: every row alone, beside others, and inside ragged chunks, against one chunk."""
    config = model.config
    length = min(LONG, config.max_position_embeddings)
    pool = ScratchPool(page, 2 * length)
    one, two = (pool.sequence(length, config.vocab_size, seed) for seed in (1, 2))
    layer = _LayerUnderTest(pool, rule, config.num_attention_heads, window, model.dtype)
    whole = {seq.rid: layer.run([Chunk(seq, 0, length)]) for seq in (one, two)}
    draw = random.Random(length)
    for _ in range(12):
        starts = [draw.randrange(length) for _ in range(6)] + [length - 1]
        chunks = [Chunk(draw.choice((one, two)), start, 1) for start in starts]
        chunks.append(Chunk(one, starts[0], min(draw.randrange(2, 40), length - starts[0])))
        expected = torch.cat([whole[c.seq.rid][c.start : c.start + c.length] for c in chunks])
        if not torch.equal(layer.run(chunks), expected):
            return False
    return True


class _LayerUnderTest:
    """Our attention called as a layer would, on numbers that depend on a row's sequence and position alone."""

    def __init__(self, pool: KvPool, rule: Rule, heads: int, window: int | None, dtype: torch.dtype) -> None:
        self.pool, self.rule, self.window, self.dtype = pool, rule, window, dtype
        self.heads = heads, pool.layout.layers[0].kv_heads, pool.layout.layers[0].kv_heads
        self.numbers: dict[int, list[torch.Tensor]] = {}

    def run(self, chunks: list[Chunk]) -> torch.Tensor:
        """[rows, H, D]"""
        step = Step(Batch(chunks), self.rule, self.dtype)
        rows = [torch.cat(parts) for parts in zip(*(self._rows(chunk) for chunk in chunks), strict=True)]
        padding = step.total_rows - step.num_rows
        q, k, v = (torch.cat([r, r[:1].expand(padding, -1, -1)]).transpose(0, 1).unsqueeze(0) for r in rows)
        module: Any = SimpleNamespace(layer_idx=0)
        out, _ = paged_attention(
            module, q, k, v, sliding_window=self.window, lumenbox_step=step, lumenbox_pool=self.pool
        )
        return out[0, : step.num_rows]

    def _rows(self, chunk: Chunk) -> list[torch.Tensor]:
        seq = chunk.seq
        if seq.rid not in self.numbers:
            make = torch.Generator().manual_seed(seq.rid)
            shapes = [(len(seq.tokens), heads, self.pool.layout.layers[0].head_dim) for heads in self.heads]
            self.numbers[seq.rid] = [torch.randn(shape, generator=make).to(self.dtype) for shape in shapes]
        return [numbers[chunk.start : chunk.start + chunk.length] for numbers in self.numbers[seq.rid]]


def model_keeps_bits(model: Any, page: PageLayout, min_rows: int) -> bool:
    """The same tokens in one chunk; then in ragged chunks and decode steps beside others: the same KV and logits."""
    length = min(page.page_size * 3 + 5, model.config.max_position_embeddings)
    pool = ScratchPool(page, 3 * length)
    engine = Engine(model, pool, exact=True, min_rows=min_rows)
    one, two, other = (pool.sequence(length, model.config.vocab_size, seed) for seed in (1, 1, 2))
    logits = engine.logits(Batch([Chunk(one, 0, length)]))
    cuts = [0, length // 3, length - 2, length - 1, length]
    for start, stop in itertools.pairwise(cuts):
        again = engine.logits(Batch([Chunk(two, start, stop - start), Chunk(other, start, stop - start)]))
    same_kv = torch.equal(_bits(pool, one), _bits(pool, two))
    return same_kv and torch.equal(logits[0], again[0])


def _bits(pool: KvPool, seq: Sequence) -> torch.Tensor:
    """All KV of a sequence; what lies behind its last token was cleared."""
    return pool.pages[seq.page_table]


def numeric_class(dtype: str, threads: int, verdict: Verdict) -> str:
    """A readable word for each thing that a result's bits depend on. Across classes nothing is shared or promised."""
    rule = f"exact-rows{verdict.min_rows}" if verdict.exact else "inexact"
    return f"{_processor()} torch{torch.__version__} {dtype} threads{threads} {rule}"


def _processor() -> str:
    """Instruction set and model: BLAS picks its kernels by both."""
    text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    family, number = (re.search(rf"^{key}\s*:\s*(\d+)$", text, re.MULTILINE) for key in ("cpu family", "model"))
    model = f"-{family[1]}-{number[1]}" if family and number else ""
    return torch.backends.cpu.get_cpu_capability().lower() + model
