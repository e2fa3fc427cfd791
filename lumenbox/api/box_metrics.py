"""The box's state document (`status --json`) and its figures → Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from lumenbox.coordinator.figures import Buckets, Figures

LABELS = ("model_name", "engine")
WORKER_STATES = (
    *("starting", "loading", "assisting", "ready", "suspect"),
    *("draining", "drained", "stopped", "dead", "quarantined"),
)


def counter(name: str, text: str, model: str, value: float | None, *labels: str) -> CounterMetricFamily:
    """A counter of the whole box (its `_total` is added); value None leaves the samples to the caller."""
    family = CounterMetricFamily(name, text, labels=[*LABELS, *labels])
    if value is not None:
        family.add_metric([model, "box"], value)
    return family


def histogram(name: str, text: str, model: str, data: Buckets) -> HistogramMetricFamily:
    """A histogram of the whole box."""
    family = HistogramMetricFamily(name, text, labels=LABELS)
    family.add_metric([model, "box"], cumulative(data), data.sum)
    return family


def cumulative(data: Buckets) -> list[tuple[str, float]]:
    """Bucket counts as Prometheus wants them: each includes the smaller ones."""
    bounds = [*map(str, data.bounds), "+Inf"]
    return list(zip(bounds, accumulate(map(float, data.counts)), strict=True))


def box_metrics(model: str, state: dict[str, Any]) -> Iterator[Metric]:
    """Everything that the state document tells."""
    workers = state["workers"]
    counters = state["counters"]
    yield per_worker("vllm:num_requests_running", "Requests in a batch.", model, workers, "running")
    yield per_worker("vllm:num_requests_waiting", "Requests without pages.", model, workers, "waiting")
    yield cache_usage(model, workers)
    yield counter("vllm:generation_tokens", "Tokens drawn.", model, counters["generated_tokens"])
    yield counter("vllm:num_preemptions", "Requests put back.", model, counters.get("preemptions", 0))
    yield worker_states(model, workers)
    checkpoint, assist = state["checkpoint"], state["assist"]
    yield gauge("lumenbox:checkpoint_coverage", "Share of requests with sealed pages.", model, checkpoint["coverage"])
    yield gauge("lumenbox:checkpoint_lag_tokens", "Tokens not sealed yet.", model, checkpoint["lag_tokens"])
    yield gauge("lumenbox:holder_load_balance", "Most held pages to fewest.", model, checkpoint["holder_balance"])
    yield counter("lumenbox:checkpoint_evictions", "Checkpoints evicted.", model, checkpoint["evictions"])
    yield from holder_metrics(model, workers)
    yield gauge("lumenbox:assist_acceptance", "Share of drafts accepted.", model, assist["acceptance"] or 0)


def gauge(name: str, text: str, model: str, value: float) -> GaugeMetricFamily:
    """A gauge of the whole box."""
    family = GaugeMetricFamily(name, text, labels=LABELS)
    family.add_metric([model, "box"], value)
    return family


def per_worker(name: str, text: str, model: str, workers: Sequence[dict[str, Any]], key: str) -> GaugeMetricFamily:
    """One field of every worker."""
    family = GaugeMetricFamily(name, text, labels=LABELS)
    for worker in workers:
        family.add_metric([model, str(worker["id"])], worker[key])
    return family


def holder_metrics(model: str, workers: Sequence[dict[str, Any]]) -> Iterator[Metric]:
    """What each worker holds for others, and what was written and read of it."""
    yield per_worker("lumenbox:holder_pages", "Pages on its budget.", model, workers, "arena_pages")
    yield per_worker("lumenbox:holder_budget_pages", "Its budget.", model, workers, "arena_budget_pages")
    yield per_worker("lumenbox:holder_bytes", "Bytes on its budget.", model, workers, "arena_bytes")
    yield per_worker("lumenbox:holder_sealed_bytes_per_second", "Written to it.", model, workers, "sealed_bytes_s")
    for name, text, key in (
        ("lumenbox:holder_sealed_bytes", "Bytes written to it.", "sealed_bytes"),
        ("lumenbox:holder_restored_bytes", "Bytes loaded from it.", "restored_bytes"),
        ("lumenbox:holder_restore_seconds", "What loading them took.", "restore_s"),
    ):
        family = CounterMetricFamily(name, text, labels=LABELS)
        for worker in workers:
            family.add_metric([model, str(worker["id"])], worker[key])
        yield family


def cache_usage(model: str, workers: Sequence[dict[str, Any]]) -> GaugeMetricFamily:
    """Pages of running requests per page of the pool: 0 to 1, whatever the name says."""
    family = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of pages in use (1 = all).", labels=LABELS)
    for worker in workers:
        family.add_metric([model, str(worker["id"])], worker["pages_used"] / max(worker["pages_total"], 1))
    return family


def worker_states(model: str, workers: Sequence[dict[str, Any]]) -> GaugeMetricFamily:
    """1 for the state that a worker is in, 0 for the others."""
    family = GaugeMetricFamily("lumenbox:worker_state", "State of a worker.", labels=[*LABELS, "state"])
    for worker in workers:
        for name in WORKER_STATES:
            family.add_metric([model, str(worker["id"]), name], worker["state"] == name)
    return family


def recovery_metrics(model: str, figures: Figures) -> Iterator[Metric]:
    """What failed and how it was mended."""
    failures = counter("lumenbox:worker_failures", "Lost workers.", model, None, "cause")
    for cause, count in figures.failures.items():
        failures.add_metric([model, "box", cause], count)
    yield failures
    recoveries = counter("lumenbox:recoveries", "Interrupted requests by way back.", model, None, "way", "outcome")
    for (way, outcome), count in figures.recoveries.items():
        recoveries.add_metric([model, "box", way, outcome], count)
    yield recoveries
    tokens = counter("lumenbox:recovered_tokens", "Tokens by where their KV came from.", model, None, "source")
    for source, count in figures.tokens.items():
        tokens.add_metric([model, "box", source], count)
    yield tokens
    yield histogram("lumenbox:recovery_stall_seconds", "Pause that a client saw.", model, figures.stall_s)
    yield histogram("lumenbox:worker_respawn_seconds", "Death to ready.", model, figures.respawn_s)
    phases = HistogramMetricFamily("lumenbox:recovery_phase_seconds", "A recovery's phases.", labels=[*LABELS, "phase"])
    for phase, data in figures.phase_s.items():
        phases.add_metric([model, "box", phase], cumulative(data), data.sum)
    yield phases
