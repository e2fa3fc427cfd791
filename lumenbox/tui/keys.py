"""Keys: bytes of a terminal to names, and what a key does. Pure: the loop performs the actions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lumenbox.tui.snapshot import Action, Controls, Document

HANGUP = "hangup"
"""The terminal is gone."""
NAMES = {b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"\x1b": "escape"}
KEY = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
MOVES = {"up": -1, "down": 1}
FAULTS = {"K": "kill", "H": "hang", "R": "restart"}
ASKED_FIRST = {"kill", "down"}


@dataclass(frozen=True, slots=True)
class Pressed:
    """What a key led to."""

    controls: Controls
    action: Action | None = None


def decode(data: bytes) -> list[str]:
    """The names of the keys in what the terminal sent; no bytes at all mean that it is gone."""
    if not data:
        return [HANGUP]
    return [NAMES.get(key, key.decode("latin-1")) for key in KEY.findall(data)]


def press(controls: Controls, key: str, state: Document) -> Pressed:
    """What `key` does. Any key but y takes back a question; killing a worker and ending the box are asked first."""
    workers: Sequence[Document] = state["workers"]
    if controls.confirming is not None:
        agreed = controls.confirming if key == "y" else None
        return Pressed(replace(controls, confirming=None, notice=_announce(agreed)), agreed)
    controls = replace(controls, notice="", selected=min(controls.selected, len(workers) - 1))
    if key in MOVES:
        return Pressed(replace(controls, selected=(controls.selected + MOVES[key]) % len(workers)))
    if key == "p":
        return Pressed(replace(controls, paused=not controls.paused))
    action = _meant(key, workers[controls.selected], controls.owns_box)
    if action is None or action.verb == "leave":
        return Pressed(controls, action)
    if action.verb in ASKED_FIRST:
        return Pressed(replace(controls, confirming=action))
    return Pressed(replace(controls, notice=_announce(action)), action)


def _meant(key: str, worker: Document, owns_box: bool) -> Action | None:
    match key:
        case "q":
            return Action("down" if owns_box else "leave")
        case "D":
            return Action("resume" if worker["state"] == "drained" else "drain", worker["id"])
        case "K" | "H" | "R":
            return Action(FAULTS[key], worker["id"])
    return None


def question(action: Action, state: Document) -> str:
    """What is asked before an action."""
    if action.verb != "down":
        return f"{action}?"
    if state["state"] == "draining":
        return "stop at once? open streams end with an error."
    return "drain and stop the box?"


def _announce(action: Action | None) -> str:
    return f"{action} …" if action else ""
