"""Throughput of the last minute as a sparkline, with a cross under the moments in which a worker was lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.text import Text

from lumenbox.core.machine import PLANNED_CAUSES
from lumenbox.tui.fields import compact, cut

INTERVAL_S = 0.5
KEPT = 240
LEVELS = " ▁▂▃▄▅▆▇█"
FAILURES = {"worker_dead", "fork_server_dead"}
LABEL = "tok/s "


@dataclass(frozen=True, slots=True)
class Sample:
    """How many tokens the box had drawn in all at wall-clock time `t`."""

    t: float
    tokens: int


@dataclass(frozen=True, slots=True)
class History:
    """Samples at least INTERVAL_S apart; each pair of neighbours is one column of the sparkline."""

    samples: tuple[Sample, ...] = ()

    def after(self, t: float, tokens: int) -> History:
        """The history with one more sample, if it is time for one."""
        if self.samples and t - self.samples[-1].t < INTERVAL_S:
            return self
        return History((*self.samples, Sample(t, tokens))[-KEPT:])

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each column."""
        return [(b.tokens - a.tokens) / (b.t - a.t) for a, b in pairwise(self.samples)]

    def failures(self, events: Sequence[dict[str, Any]]) -> list[bool]:
        """Whether a worker was lost, for each column; one that was replaced on purpose is not."""
        times = [e["t"] for e in events if e["kind"] in FAILURES and e.get("why") not in PLANNED_CAUSES]
        return [any(a.t < t <= b.t for t in times) for a, b in pairwise(self.samples)]


def levels(rates: Sequence[float], peak: float) -> str:
    """One block a rate, in eighths of the peak; nothing only where nothing was drawn."""
    return "".join(LEVELS[max(1, round(8 * rate / peak))] if rate > 0 else LEVELS[0] for rate in rates)


def sparkline(history: History, events: Sequence[dict[str, Any]], width: int) -> list[Text]:
    """Two lines: throughput with its peak, and the failure marks below. None before there is anything to draw."""
    rates, failures = history.rates, history.failures(events)
    if not rates:
        return []
    columns = max(1, width - len(LABEL) - 12)
    shown = rates[-columns:]
    peak = max(shown)
    bars = Text.assemble((LABEL, "dim"), (levels(shown, peak).rjust(columns), "green"), f"  peak {compact(peak)}")
    marks = "".join("✕" if failed else " " for failed in failures[-columns:])
    return [cut(bars, width), cut(Text(" " * len(LABEL) + marks.rjust(columns), "bold red"), width)]
