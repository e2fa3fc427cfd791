"""From the values of `up`'s flags to one frozen BoxConfig. The only place that reads the environment."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import click
import msgspec

from lumenbox.config import BoxConfig
from lumenbox.core.state import CheckpointConfig
from lumenbox.errors import StartupError
from lumenbox.models import catalogue
from lumenbox.worker.faults import POINTS

FAULT = re.compile(
    rf"die_on_text:.+|exit0_at_start:\d+|slow_step:\d+:\d+(\.\d+)?|die_at:({'|'.join(POINTS)})(:\d+){{0,2}}"
)
"""A fault that misses its target by a misprint would prove whatever it was to prove."""


def resolve(values: dict[str, Any]) -> BoxConfig:
    """Decide everything that can be decided before anything is started; may fetch nothing and starts nothing."""
    if values["devices"] not in ("auto", "cpu"):
        raise StartupError(f"--devices {values['devices']}: this version serves on cpu only")
    model = values["model"] or catalogue.catalogue().default
    workers = values["workers"] or 2
    return BoxConfig(
        model=model,
        model_dir=Path(),
        served_name=values["served_model_name"] or _short_name(model),
        workers=workers,
        host=values["host"],
        port=values["port"],
        run_dir=values["run_dir"].absolute(),
        api_keys=tuple(values["api_keys"]),
        max_model_len=values["max_model_len"],
        max_num_seqs=values["max_num_seqs"],
        max_num_batched_tokens=values["max_num_batched_tokens"],
        page_size=values["page_size"],
        kv_pages=values["kv_pages"],
        kv_bytes=values["kv_cache_memory"],
        dtype=values["dtype"],
        exact=values["exact"],
        seed=values["seed"],
        max_queue=values["max_queue"],
        drain_timeout_s=values["drain_timeout"],
        respawn=not values["no_respawn"],
        recovery=values["recovery"],
        generation_config=values["generation_config"],
        checkpoint_bytes=values["checkpoint_budget"],
        checkpoints=_checkpoints(values, workers),
        reload_bytes_s=float(values["reload_bandwidth"]),
        faults=_faults(bool(values["api_keys"]), values["chaos_env"]),
        threads=_threads(workers),
        created=int(time.time()),
    )


CHECKPOINT_FLAGS = (
    "placement", "routing", "load_estimate", "alpha", "beta", "lam", "routing_rule", "theta", "tau",
)  # fmt: skip


def _checkpoints(values: dict[str, Any], workers: int) -> CheckpointConfig:
    """The strategy's own parts, overridden by those that are named."""
    named = {name: values[name] for name in CHECKPOINT_FLAGS if values[name] is not None}
    return msgspec.structs.replace(
        CheckpointConfig.defaults(values["recovery"]),
        replicas=values["replicas"],
        eviction=values["eviction"],
        failure_domains=_domains(values["failure_domains"], workers),
        **named,
    )


def _domains(text: str | None, workers: int) -> tuple[tuple[int, ...], ...]:
    """`0-3,4-7` as worker numbers; workers that are not named fail by themselves."""
    domains: list[tuple[int, ...]] = []
    for part in (text or "").split(",") if text else []:
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit() or int(last or first) >= workers:
            raise click.UsageError(f"--failure-domains: {part!r} is not a range of workers 0 to {workers - 1}")
        domains.append(tuple(range(int(first), int(last or first) + 1)))
    named = [worker for domain in domains for worker in domain]
    if len(named) != len(set(named)):
        raise click.UsageError("--failure-domains: a worker stands in two domains")
    return (*domains, *((worker,) for worker in range(workers) if worker not in named))


def _short_name(model: str) -> str:
    return Path(model).name if os.path.isdir(model) else model


def _threads(workers: int) -> int:
    """Cores for each worker, one left for the coordinator: OpenMP threads that share a core wait for one another."""
    return max(1, (len(os.sched_getaffinity(0)) - 1) // workers)


def _faults(has_key: bool, allowed: bool) -> tuple[str, ...]:
    specs = tuple(spec.strip() for spec in os.environ.get("LUMENBOX_FAULT", "").split(",") if spec.strip())
    if specs and has_key and not allowed:
        raise StartupError("LUMENBOX_FAULT is set beside an API key: unset it, or pass --chaos-env")
    for spec in specs:
        if not FAULT.fullmatch(spec):
            raise click.UsageError(f"LUMENBOX_FAULT: no such fault as {spec!r}")
    return specs
