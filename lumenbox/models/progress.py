"""How a pull tells its story; the command line decides what it looks like."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """What a pull reports to. Calls may come from a thread."""

    def note(self, text: str) -> None:
        """One line about what happens now."""

    def advance(self, label: str, done_bytes: int, total_bytes: int) -> None:
        """`done_bytes` of `total_bytes` of the file `label` are there."""


class Silent:
    """Reports nothing."""

    def note(self, text: str) -> None:
        """Ignore it."""

    def advance(self, label: str, done_bytes: int, total_bytes: int) -> None:
        """Ignore it."""
