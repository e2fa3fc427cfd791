"""Short pieces of text side by side; what does not fit goes in the order of its rank, and a line never wraps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.text import Text


@dataclass(frozen=True, slots=True)
class Field:
    """A piece of a line. The one with the highest rank is the first to go; rank 0 stays, cut if it must be."""

    text: str
    style: str = ""
    rank: int = 0


def row(fields: Iterable[Field], width: int, gap: int = 2) -> Text:
    """One line of at most `width` columns."""
    kept = list(fields)
    while len(kept) > 1 and sum(len(f.text) + gap for f in kept) - gap > width:
        kept.remove(max(kept, key=lambda f: f.rank))
    return cut(Text(" " * gap).join(Text(clean(f.text), f.style) for f in kept), width)


def cut(line: Text, width: int) -> Text:
    """The line, shortened in place to `width` columns."""
    line.truncate(max(1, width), overflow="ellipsis")
    return line


def clean(text: str) -> str:
    """On one line, and without characters that steer a terminal: names and messages come from outside."""
    return "".join(character if character.isprintable() else " " for character in text)


def compact(number: float) -> str:
    """Few digits: 9999, 26k."""
    return f"{number:.0f}" if number < 10_000 else f"{number / 1000:.0f}k"


def clock(seconds: float) -> str:
    """0:00:07, 27:10:00."""
    return f"{seconds // 3600:.0f}:{seconds // 60 % 60:02.0f}:{seconds % 60 // 1:02.0f}"
