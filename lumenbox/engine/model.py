"""The engine: one step of a batch through the model. It reads sequences and never changes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lumenbox.core.batching import Batch
from lumenbox.core.requests import Sampled
from lumenbox.engine import architecture, sampler, weights
from lumenbox.engine.kv_pool import KvPool
from lumenbox.engine.steps import Rule, Step
from lumenbox.memory.layout import LoadReport


class Engine:
    """A model bound to its weights, and the KV pool it reads and writes."""

    def __init__(self, model: Any, pool: KvPool, *, exact: bool, min_rows: int) -> None:
        self.model = model
        self.pool = pool
        self.rule = Rule(pool.page_size, exact, min_rows if exact else 1)

    def execute(self, batch: Batch) -> list[Sampled]:
        """Compute one step and draw a token for each sampling chunk, in the batch's order."""
        sequences = [chunk.seq for chunk in batch.chunks if chunk.samples]
        return sampler.sample(sequences, self.logits(batch))

    @torch.inference_mode()
    def logits(self, batch: Batch) -> torch.Tensor:
        """Write the batch's KV; return the logits of its sampling rows, [rows, vocabulary], in the model's dtype."""
        step = Step(batch, self.rule, self.model.dtype)
        for page, tokens in step.opened_pages:
            self.pool.clear_tail(page, tokens)
        wanted = step.sample_rows
        padded = wanted + [0] * (self.rule.min_rows - len(wanted))
        return self._forward(step, padded)[: len(wanted)]

    def _forward(self, step: Step, rows: list[int]) -> torch.Tensor:
        output = self.model(
            input_ids=torch.from_numpy(step.token_ids).unsqueeze(0),
            position_ids=torch.from_numpy(step.positions).unsqueeze(0),
            use_cache=False,
            logits_to_keep=torch.tensor(rows, dtype=torch.int64),
            lumenbox_step=step,
            lumenbox_pool=self.pool,
        )
        return output.logits[0]


def build(report: LoadReport, model_dir: Path, weight_fd: int, pool_fd: int) -> Engine:
    """A worker's engine: attach to weights and pool as the loader laid them out. Costs milliseconds."""
    torch.set_num_threads(report.threads)
    config = architecture.read_config(model_dir)
    model = weights.attach(weight_fd, report.weights, config)
    return Engine(model, KvPool(pool_fd, report.page), exact=report.exact, min_rows=report.min_rows)
