"""What the picture is drawn from: one frozen value, made from the box's own documents (CONTRACT §2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lumenbox.tui.history import History

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Action:
    """Something to do to the box: `verb` is kill, hang, drain, resume, restart, down or leave."""

    verb: str
    worker: int | None = None

    def __str__(self) -> str:
        return self.verb if self.worker is None else f"{self.verb} worker {self.worker}"


@dataclass(frozen=True, slots=True)
class Controls:
    """The state of the keyboard's side. `owns_box`: leaving means ending the box."""

    owns_box: bool = False
    selected: int = 0
    paused: bool = False
    confirming: Action | None = None
    notice: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment of a box. Without `controls` it is a picture for paper: no selection, no key help."""

    state: Document
    events: tuple[Document, ...] = ()
    report: Document | None = None
    history: History = field(default_factory=History)
    controls: Controls | None = None
    trouble: str = ""
    """Why `state` is not fresh; empty if it is."""
