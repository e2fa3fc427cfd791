"""`/metrics`: what the API sees of requests, and the state of the box read at scrape time.

Names are vLLM's where the meaning is the same (CONTRACT §3). A figure of one worker carries its number as `engine`;
one of the whole box carries `engine="box"`, since a request may change workers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from lumenbox.api.box_metrics import box_metrics, counter, histogram, recovery_metrics
from lumenbox.coordinator.figures import Buckets
from lumenbox.coordinator.streams import Delta, Service, Stream

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
STEPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
FINISHES = ("stop", "length", "tool_calls", "abort", "error")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics(Collector):
    """The figures of one box; written from the event loop only."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.first_token_s = Buckets(SECONDS)
        self.between_tokens_s = Buckets(STEPS)
        self.whole_s = Buckets(SECONDS)
        self.finished: Counter[str] = Counter(dict.fromkeys(FINISHES, 0))
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def expose(self) -> bytes:
        """The page in Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Nothing in advance: else registering would ask a box that is not up yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Every metric as it stands."""
        model = self.service.info.name
        yield histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", model, self.first_token_s)
        yield histogram("vllm:inter_token_latency_seconds", "Between two deltas.", model, self.between_tokens_s)
        yield histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", model, self.whole_s)
        yield histogram("vllm:request_queue_time_seconds", "Arrival to admission.", model, self.service.figures.queue_s)
        yield counter("vllm:prompt_tokens", "Prompt tokens taken in.", model, self.prompt_tokens)
        yield counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", model, self.prompt_tokens)
        yield counter("vllm:prefix_cache_hits", "Prompt tokens found.", model, self.cached_tokens)
        success = counter("vllm:request_success", "Finished choices by reason.", model, None, "finished_reason")
        for reason, count in self.finished.items():
            success.add_metric([model, "box", reason], count)
        yield success
        yield from box_metrics(model, self.service.state())
        yield from recovery_metrics(model, self.service.figures)


class StreamMeter:
    """Times one answer that `arrived` at a time of time.monotonic; `saw` once per delta is all that a token costs."""

    def __init__(self, metrics: Metrics, choices: int, arrived: float) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._last: dict[int, float] = {}
        self._left = choices
        self._failed = False

    def saw(self, delta: Delta) -> None:
        """Observe the time of one delta."""
        now = time.monotonic()
        before = self._last.get(delta.choice)
        if before is not None:
            self._metrics.between_tokens_s.observe(now - before)
        elif not self._last:
            self._metrics.first_token_s.observe(now - self._arrived)
        self._last[delta.choice] = now
        if delta.finish_reason is not None:
            self._left -= 1
            self._metrics.finished[delta.finish_reason] += 1

    def failed(self) -> None:
        """The box could not finish the answer."""
        self._failed = True

    def close(self, stream: Stream) -> None:
        """The answer is over, one way or another."""
        metrics = self._metrics
        metrics.prompt_tokens += stream.prompt_tokens
        metrics.cached_tokens += stream.cached_tokens
        if self._left:
            metrics.finished["error" if self._failed else "abort"] += self._left
        else:
            metrics.whole_s.observe(time.monotonic() - self._arrived)
