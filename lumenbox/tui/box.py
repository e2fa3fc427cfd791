"""Asking and steering a box: the same verbs through its control socket, or handed in by the process that runs it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from lumenbox.coordinator import control
from lumenbox.errors import NotRunning, TimedOut
from lumenbox.tui.snapshot import Action, Document, Snapshot

LOOK_S = 1.0
ACT_S = 120.0
KEPT_EVENTS = 256
CALLS: dict[str, tuple[str, dict[str, str]]] = {
    "kill": ("chaos", {"kind": "kill"}),
    "hang": ("chaos", {"kind": "hang"}),
    "drain": ("drain", {}),
    "resume": ("resume", {}),
    "restart": ("restart", {}),
    "down": ("down", {}),
}


class Call(Protocol):
    """Sends a verb to the box and gives its answers. Raises LumenboxError or OSError; blocks, not longer than asked."""

    def __call__(self, verb: str, timeout_s: float, /, **arguments: Any) -> Iterable[Document]: ...


def through_socket(run_dir: Path) -> Call:
    """To the box that runs in `run_dir`."""
    return functools.partial(control.call, run_dir)


def in_process(loop: asyncio.AbstractEventLoop, verbs: dict[str, control.Verb]) -> Call:
    """To the box on `loop` in this process, from another thread."""

    async def answers(verb: str, arguments: Document) -> list[Document]:
        return [answer async for answer in verbs[verb](arguments)]

    def call(verb: str, timeout_s: float, /, **arguments: Any) -> list[Document]:
        future = asyncio.run_coroutine_threadsafe(answers(verb, arguments), loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            raise TimedOut(f"{verb} took longer than {timeout_s:.0f} s") from None
        except concurrent.futures.CancelledError:
            raise NotRunning("the box has ended") from None

    return call


def look(call: Call, before: Snapshot | None, now: float) -> Snapshot:
    """The next snapshot: asks for the state, for the events that are new, and for a report that may have changed."""
    state = _first(call("status", LOOK_S))
    if before is None or state["pid"] != before.state["pid"]:
        before = Snapshot(state, controls=before.controls if before else None)
    news = list(call("events", LOOK_S, since=before.events[-1]["seq"] if before.events else 0))
    report = before.report
    if is_open(report) or any(event["kind"] == "recovery" for event in news):
        report = _first(call("report", LOOK_S, which="last"))
    history = before.history.after(now, state["counters"]["generated_tokens"])
    events = (*before.events, *news)[-KEPT_EVENTS:]
    return replace(before, state=state, events=events, report=report, history=history, trouble="")


def perform(call: Call, action: Action) -> str:
    """Do it; returns what became of it, for people."""
    verb, arguments = CALLS[action.verb]
    target = {} if action.worker is None else {"worker": action.worker}
    answer = _first(call(verb, ACT_S, **arguments, **target))
    return f"{action}: {answer.get('verified') or answer.get('state') or 'done'}"


def is_open(report: Document | None) -> bool:
    """Whether a report still waits for a stream or for the next incarnation."""
    if report is None:
        return False
    return report["respawn_s"] is None or (bool(report["requests"]) and report["recovered_s"] is None)


def _first(answers: Iterable[Document]) -> Document:
    return next(iter(list(answers)), {})
