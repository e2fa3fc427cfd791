"""Fill the weight segment once for the box, prove exactness, and report what every worker needs to attach.

Runs in a process forked from the fork server (one thread, no operator run before), and ends with it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lumenbox.engine import architecture, probe, trial, weights
from lumenbox.engine.kv_pool import page_layout
from lumenbox.engine.probe import Verdict
from lumenbox.errors import ModelError
from lumenbox.memory.layout import LoadReport, PageLayout


def load(
    model_dir: Path,
    allocate: Callable[[int], int],
    *,
    dtype: str = "auto",
    exact: str = "auto",
    page_size: int = 16,
    threads: int = 1,
) -> LoadReport:
    """Load the model of `model_dir` into the segment that `allocate(bytes)` returns a descriptor of.

    `exact` is auto, on or off. Raises ModelError with one line for whatever cannot be served.
    """
    torch.set_num_threads(threads)
    plan = weights.plan(model_dir, dtype)
    fd = allocate(plan.total_bytes)
    digest = weights.fill(plan, fd)
    config = architecture.read_config(model_dir)
    model = weights.attach(fd, plan.entries, config)
    page = page_layout(config, plan.dtype, page_size)
    trial.try_unknown(model, page)
    verdict = judge(model, page, exact)
    numeric_class = probe.numeric_class(plan.dtype, threads, verdict)
    return LoadReport(
        weights=plan.entries,
        weight_bytes=plan.total_bytes,
        page=page,
        dtype=plan.dtype,
        threads=threads,
        numeric_class=numeric_class,
        identity=identity(config, digest, page, numeric_class),
        exact=verdict.exact,
        inexact_reason=verdict.reason,
        min_rows=verdict.min_rows,
    )


def judge(model: Any, page: PageLayout, exact: str) -> Verdict:
    """Whether bits are kept: asked for, and proved by the probe."""
    if exact == "off":
        return Verdict(False, 1, "switched off")
    verdict = probe.prove(model, page)
    if exact == "on" and not verdict.exact:
        raise ModelError(f"--exact on: not proved for this model ({verdict.reason}); use --exact auto")
    return verdict


def identity(config: Any, weight_digest: str, page: PageLayout, numeric_class: str) -> str:
    """What a KV page's bytes depend on, as a hex digest: nothing is ever shared across two identities."""
    described = config.to_dict()
    for accident in ("_name_or_path", "transformers_version"):
        described.pop(accident, None)
    parts = (json.dumps(described, sort_keys=True, default=str), weight_digest, repr(page), numeric_class)
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
