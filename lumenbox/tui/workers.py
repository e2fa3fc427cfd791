"""The table of workers. Columns go one by one as the terminal narrows; the state is the last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from lumenbox.tui.fields import clean, compact, cut
from lumenbox.tui.snapshot import Document

WIDE = 107
STATE_STYLES = {
    "ready": "green",
    "suspect": "bold magenta",
    "dead": "bold red",
    "quarantined": "bold red",
    "stopped": "red",
    "drained": "cyan",
}
OTHER_STATE = "yellow"


@dataclass(frozen=True, slots=True)
class Column:
    """One column; the one with the highest rank is the first to go. Text is left-aligned where `width` is negative."""

    title: str
    width: int
    rank: int
    cell: Callable[[Document], str]

    def aligned(self, text: str) -> str:
        return clean(text).ljust(-self.width) if self.width < 0 else clean(text).rjust(self.width)


def columns(width: int) -> list[Column]:
    """Those that fit, in their order."""
    wide = width >= WIDE
    bar = 20 if wide else 7
    kept = [
        Column("id", 3, 1, lambda w: str(w["id"])),
        Column("state", -11, 0, lambda w: str(w["state"])),
        Column("pid", 7, 6, lambda w: str(w["pid"] or "-")),
        Column("inc", 3, 8, lambda w: str(w["incarnation"])),
        Column("running" if wide else "run", 7 if wide else 4, 2, lambda w: str(w["running"])),
        Column("waiting" if wide else "wait", 7 if wide else 4, 5, lambda w: str(w["waiting"])),
        Column("pages", -(bar + 10), 7, lambda w: f"{pages_bar(w, bar)} {pages_text(w)}"),
        Column("step ms", 7, 4, lambda w: f"{w['step_ms']:.1f}"),
        Column("tok/s", 6, 3, lambda w: f"{w['tokens_per_s']:.0f}"),
        Column("restarts", 8, 9, lambda w: str(w["restarts"])),
    ]
    while len(kept) > 1 and sum(abs(c.width) for c in kept) + gap(width) * (len(kept) - 1) > width:
        kept.remove(max(kept, key=lambda c: c.rank))
    return kept


def gap(width: int) -> int:
    """Spaces between columns."""
    return 2 if width >= WIDE else 1


def table(workers: Sequence[Document], width: int, selected: int | None, room: int | None = None) -> list[Text]:
    """A title line and a line for each worker; with `room` for fewer lines, those around the selected one."""
    shown, space = columns(width), " " * gap(width)
    title = Text(space.join(c.aligned(c.title) for c in shown).rstrip(), "dim")
    rows = [_row(worker, shown, space, index == selected) for index, worker in enumerate(workers)]
    if room is not None and room <= len(rows):
        room = max(1, room - 1)
        first = min(max(0, (selected or 0) - room // 2), len(rows) - room)
        rows = rows[first : first + room]
    return [cut(line, width) for line in (title, *rows)]


def _row(worker: Document, shown: list[Column], space: str, selected: bool) -> Text:
    line = Text(style="bold" if selected else "")
    for column in shown:
        text = column.aligned(column.cell(worker))
        if column.title == "id" and selected:
            text = "▸" + text[1:]
        style = STATE_STYLES.get(text.strip(), OTHER_STATE) if column.title == "state" else ""
        line.append((space if line else "") + text, style)
    line.rstrip()
    return line


def pages_bar(worker: Document, columns: int) -> str:
    """Used, cached and free pages as parts of a bar; what is there at all shows."""
    total = max(1, worker["pages_total"])
    used: int = min(columns, -(-columns * worker["pages_used"] // total))
    cached: int = min(columns - used, -(-columns * worker["pages_cached"] // total))
    return "█" * used + "▒" * cached + "·" * (columns - used - cached)


def pages_text(worker: Document) -> str:
    """Used of all."""
    return f"{compact(worker['pages_used'])}/{compact(worker['pages_total'])}"
