"""The box's state document (`status --json`) → Prometheus metrics. Parts that do not exist yet stand there as 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

LABELS = ("model_name", "engine")
WORKER_STATES = (
    *("starting", "loading", "assisting", "ready", "suspect"),
    *("draining", "drained", "stopped", "dead", "quarantined"),
)
# Of later parts; label values as they will be, so that dashboards can be built today.
ABSENT_COUNTERS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("lumenbox:recoveries", "Interrupted requests by way back.", {"way": "none", "outcome": "none"}),
    ("lumenbox:recovered_tokens", "Tokens by where they came from.", {"source": "none"}),
)
ABSENT_HISTOGRAMS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("lumenbox:recovery_stall_seconds", "Pause that a client saw.", {}),
    ("lumenbox:recovery_phase_seconds", "Duration of a recovery's phases.", {"phase": "none"}),
    ("lumenbox:worker_respawn_seconds", "Death to ready.", {}),
)


class Histogram(Protocol):
    """What is read of a histogram: upper bounds, a count per bucket (one more than bounds), and the sum."""

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float


def counter(name: str, text: str, model: str, value: float | None, *labels: str) -> CounterMetricFamily:
    """A counter of the whole box (its `_total` is added); value None leaves the samples to the caller."""
    family = CounterMetricFamily(name, text, labels=[*LABELS, *labels])
    if value is not None:
        family.add_metric([model, "box"], value)
    return family


def histogram(name: str, text: str, model: str, data: Histogram) -> HistogramMetricFamily:
    """A histogram of the whole box."""
    family = HistogramMetricFamily(name, text, labels=LABELS)
    bounds = [*map(str, data.bounds), "+Inf"]
    family.add_metric([model, "box"], list(zip(bounds, accumulate(data.counts), strict=True)), data.sum)
    return family


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
    failures = counter("lumenbox:worker_failures", "Dead workers.", model, None, "cause")
    failures.add_metric([model, "box", "any"], counters["worker_deaths"])
    yield failures
    checkpoint, assist = state["checkpoint"], state["assist"]
    yield gauge("lumenbox:checkpoint_coverage", "Share of full pages sealed.", model, checkpoint["coverage"])
    yield gauge("lumenbox:checkpoint_lag_tokens", "Tokens not sealed yet.", model, checkpoint["lag_tokens"])
    yield gauge("lumenbox:holder_load_balance", "Least to most loaded holder.", model, checkpoint["holder_balance"])
    yield gauge("lumenbox:assist_acceptance", "Share of drafts accepted.", model, assist["acceptance"] or 0)
    yield from absent_metrics(model)


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


def absent_metrics(model: str) -> Iterator[Metric]:
    """Names of parts that do not exist yet, at 0."""
    for name, text, labels in ABSENT_COUNTERS:
        family = CounterMetricFamily(name, text, labels=[*LABELS, *labels])
        family.add_metric([model, "box", *labels.values()], 0)
        yield family
    for name, text, labels in ABSENT_HISTOGRAMS:
        empty = HistogramMetricFamily(name, text, labels=[*LABELS, *labels])
        empty.add_metric([model, "box", *labels.values()], [("1.0", 0), ("+Inf", 0)], 0)
        yield empty
