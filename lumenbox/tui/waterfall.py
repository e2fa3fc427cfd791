"""A recovery as a waterfall: from the failure to the last stream's next token, each phase a bar on one scale."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rich.text import Text

from lumenbox.tui.fields import Field, cut, row
from lumenbox.tui.snapshot import Document

EIGHTHS = " ▏▎▍▌▋▊▉█"
NAME_WIDTH = 12
NUMBER_WIDTH = 10
STYLES = {"detect": "red", "fence": "magenta", "plan": "yellow", "respawn": "cyan"}
DONE_STYLE = "green"
OF_STREAMS = ("first token", "recovered")
"""Phases that only interrupted streams have."""


@dataclass(frozen=True, slots=True)
class Span:
    """A phase, in seconds from the failure; `end_s` is None while it lasts."""

    name: str
    start_s: float
    end_s: float | None


def spans(report: Document) -> list[Span]:
    """The phases of a report: the first three follow each other, the others run beside each other from the plan on."""
    detected = report["detect_s"]
    fenced = detected + report["fence_s"]
    planned = fenced + report["plan_s"]
    phases = [
        Span("detect", 0.0, detected),
        Span("fence", detected, fenced),
        Span("plan", fenced, planned),
        Span("first token", planned, report["first_token_s"]),
        Span("respawn", planned, report["respawn_s"]),
        Span("recovered", report["first_token_s"] or planned, report["recovered_s"]),
    ]
    return [phase for phase in phases if report["requests"] or phase.name not in OF_STREAMS]


def bar(span: Span, total_s: float, columns: int) -> str:
    """The span on a scale of `columns` for `total_s`: it starts at a whole column and ends at an eighth of one."""
    if total_s <= 0:
        return ""
    start = min(columns - 1, int(columns * span.start_s / total_s))
    end_s = total_s if span.end_s is None else span.end_s
    eighths = max(1, min(8 * columns, round(8 * columns * end_s / total_s)) - 8 * start)
    return " " * start + EIGHTHS[8] * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def waterfall(report: Document, width: int) -> list[Text]:
    """Title, ways, and one line a phase: its bar, what it took, and when it was over."""
    phases = spans(report)
    total_s = max(span.end_s or span.start_s for span in phases)
    columns = max(4, min(60, width - NAME_WIDTH - 2 * NUMBER_WIDTH - 1))
    return [_title(report, width), _ways(report, width), *(_phase(s, total_s, columns, width) for s in phases)]


def _title(report: Document, width: int) -> Text:
    losses = ("lost_tokens", "duplicated_tokens", "failed_requests")
    bad = any(report[name] for name in losses)
    return row(
        [
            Field(f"recovery {report['id']}", "bold"),
            Field(f"worker {report['worker']} {report['cause']}", "bold", 1),
            Field(f"lost {report['lost_tokens']}", "bold red" if bad else "green", 2),
            Field(f"duplicated {report['duplicated_tokens']}", "bold red" if bad else "green", 3),
            Field(f"failed {report['failed_requests']}", "bold red" if bad else "green", 4),
            Field(f"by {report['strategy']}", "dim", 5),
        ],
        width,
    )


def _ways(report: Document, width: int) -> Text:
    requests = report["requests"]
    if not requests:
        return cut(Text("no request was interrupted", "dim"), width)
    ways = Counter(request["way"] for request in requests)
    stalls = [request["stall_s"] for request in requests if request["stall_s"] is not None]
    recomputed = sum(request["recomputed_tokens"] for request in requests)
    return row(
        [
            Field(f"streams {len(requests)}"),
            *(Field(f"{way} {count}", "", 1) for way, count in sorted(ways.items())),
            *([Field(f"stall {_ms(min(stalls))} to {_ms(max(stalls))}", "", 2)] if stalls else []),
            Field(f"recomputed tokens {recomputed}", "", 3),
        ],
        width,
    )


def _phase(span: Span, total_s: float, columns: int, width: int) -> Text:
    style = STYLES.get(span.name, DONE_STYLE)
    took = "…" if span.end_s is None else _ms(span.end_s - span.start_s)
    over = "" if span.end_s is None else f"@ {_ms(span.end_s)}"
    numbers = (took.rjust(NUMBER_WIDTH), over.rjust(NUMBER_WIDTH + 1))
    if width < NAME_WIDTH + 4 + 2 * NUMBER_WIDTH + 1:
        return row([Field(span.name.ljust(NAME_WIDTH)), Field(took)], width, 1)
    name, picture = span.name.ljust(NAME_WIDTH), bar(span, total_s, columns).ljust(columns)
    return cut(Text.assemble(name, (picture, style), numbers[0], (numbers[1], "dim")), width)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 0.1 else f"{1000 * seconds:.0f} ms"
