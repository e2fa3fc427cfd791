"""The whole picture as a value: `render(snapshot, width, height)`. Nothing here asks for anything or knows the time."""

from __future__ import annotations

import time

from rich.text import Text

from lumenbox.tui.fields import Field, clean, clock, compact, cut, row
from lumenbox.tui.history import History, sparkline
from lumenbox.tui.keys import question
from lumenbox.tui.snapshot import Controls, Document, Snapshot
from lumenbox.tui.waterfall import waterfall
from lumenbox.tui.workers import table

BOX_STYLES = {"ready": "bold green", "dead": "bold red"}
EVENT_STYLES = {"worker_dead": "red", "quarantine": "bold red", "worker_ready": "green", "recovery": "cyan"}
AIRY = 16
"""Terminals of fewer lines get no empty ones."""
PAPER_EVENTS = 8
Block = list[Text]


def render(snapshot: Snapshot, width: int, height: int | None = None) -> Text:
    """The picture in at most `width` columns; with a height exactly that many lines, what matters least left out."""
    foot = _foot(snapshot, width)
    if height is None:
        lines = _joined(_blocks(snapshot, width, None, PAPER_EVENTS), 1) + foot
    else:
        lines = _fitted(snapshot, width, max(1, height - len(foot)))[: height - len(foot)] + foot
    return Text("\n", no_wrap=True, overflow="crop", end="").join(lines[:height])


def _fitted(snapshot: Snapshot, width: int, room: int) -> Block:
    """The body, padded to `room` lines. Events get what is left; the recovery, then the sparkline go if need be."""
    gap = 1 if room >= AIRY else 0
    blocks = _blocks(snapshot, width, room - 2 - 2 * gap, 0)
    for index in (4, 3):
        if _height(blocks, gap) > room:
            blocks[index] = []
    blocks[5] = _events(snapshot.events, width, max(0, room - _height(blocks, gap) - gap))
    lines = _joined(blocks, gap)
    return lines + [Text()] * (room - len(lines))


def _blocks(snapshot: Snapshot, width: int, table_room: int | None, events: int) -> list[Block]:
    controls, state = snapshot.controls, snapshot.state
    selected = min(controls.selected, len(state["workers"]) - 1) if controls else None
    return [
        [_header(snapshot, width)],
        table(state["workers"], width, selected, table_room),
        [_streams(state, snapshot.history, width)],
        sparkline(snapshot.history, snapshot.events, width),
        waterfall(snapshot.report, width) if snapshot.report else [],
        _events(snapshot.events, width, events),
    ]


def _height(blocks: list[Block], gap: int) -> int:
    return len(_joined(blocks, gap))


def _joined(blocks: list[Block], gap: int) -> Block:
    lines: Block = []
    for block in blocks:
        lines += ([Text()] * gap if lines and block else []) + block
    return lines


def _header(snapshot: Snapshot, width: int) -> Text:
    state = snapshot.state
    ready = sum(1 for worker in state["workers"] if worker["state"] == "ready")
    frozen = "paused" if snapshot.controls and snapshot.controls.paused else snapshot.trouble and "not answering"
    return row(
        [
            Field("lumenbox", "bold", 6),
            Field(state["model"], "bold", 1),
            Field(state["endpoint"], "", 3),
            Field(frozen or state["state"], "bold yellow" if frozen else BOX_STYLES.get(state["state"], "bold yellow")),
            Field(f"{ready}/{len(state['workers'])} workers", "", 4),
            Field(f"up {clock(state['uptime_s'])}", "", 2),
            Field("exact" if state["exact"] else "not exact", "green" if state["exact"] else "yellow", 5),
            Field(f"recovery {state['recovery']}", "dim", 7),
        ],
        width,
    )


def _streams(state: Document, history: History, width: int) -> Text:
    requests, rates = state["requests"], history.rates
    rate = rates[-1] if rates else sum(worker["tokens_per_s"] for worker in state["workers"])
    return row(
        [
            Field("streams", "dim", 6),
            Field(f"running {requests['running']}", "bold"),
            Field(f"waiting {requests['waiting']}", "", 1),
            Field(f"finished {requests['finished']}", "", 3),
            Field(f"failed {requests['failed']}", "bold red" if requests["failed"] else "", 2),
            Field(f"{compact(rate)} tok/s", "bold", 4),
            Field(f"deaths {state['counters']['worker_deaths']}", "", 5),
        ],
        width,
    )


def _events(events: tuple[Document, ...], width: int, room: int) -> Block:
    """The newest last."""
    return [_event(event, width) for event in events[-room:]] if room else []


def _event(event: Document, width: int) -> Text:
    known = ("seq", "t", "kind", "worker", "why")
    worker = f"worker {event['worker']}" if event.get("worker") is not None else ""
    rest = [str(event.get("why", "")), *(f"{key} {value}" for key, value in event.items() if key not in known)]
    return cut(
        Text.assemble(
            (time.strftime("%H:%M:%S ", time.localtime(event["t"])), "dim"),
            (f"{clean(event['kind']):<15} ", EVENT_STYLES.get(event["kind"], "")),
            f"{worker:<10}",
            clean("  ".join(part for part in rest if part)),
        ),
        width,
    )


def _foot(snapshot: Snapshot, width: int) -> Block:
    if snapshot.controls is None:
        return []
    return [cut(_message(snapshot, snapshot.controls), width), _help(snapshot.controls, width)]


def _message(snapshot: Snapshot, controls: Controls) -> Text:
    if controls.confirming is not None:
        return Text(f"{question(controls.confirming, snapshot.state)} y/n", "bold reverse")
    if snapshot.trouble:
        return Text(clean(snapshot.trouble), "bold red")
    return Text(clean(controls.notice), "yellow")


def _help(controls: Controls, width: int) -> Text:
    return row(
        [
            Field("q stop" if controls.owns_box else "q quit"),
            Field("p go on" if controls.paused else "p pause", "", 5),
            Field("↑↓ select", "", 4),
            Field("K kill", "", 1),
            Field("H hang", "", 3),
            Field("D drain/resume", "", 2),
            Field("R restart", "", 2),
        ],
        width,
    )
