"""What the control socket understands. Each verb is an async generator of JSON answers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

from lumenbox.coordinator import chaos
from lumenbox.coordinator.box import Box
from lumenbox.coordinator.control import Verb
from lumenbox.core.state import WorkerPhase
from lumenbox.errors import LumenboxError

NOW = 0
"""In the queue of signals: stop without draining."""
Call = dict[str, Any]
Answers = AsyncIterator[dict[str, Any]]


def table(box: Box, signals: asyncio.Queue[int]) -> dict[str, Verb]:
    """The verbs of one box."""

    async def status(call: Call) -> Answers:
        yield box.state()

    async def down(call: Call) -> Answers:
        signals.put_nowait(NOW if call.get("now") else signal.SIGTERM)
        yield {}

    async def events(call: Call) -> Answers:
        seen = int(call.get("since", 0))
        while True:
            for event in box.events.since(seen):
                seen = event["seq"]
                yield event
            if not call.get("follow"):
                return
            await box.events.wait(seen)

    async def report(call: Call) -> Answers:
        document = box.recoveries.find(str(call.get("which", "last")))
        if document is None:
            raise LumenboxError("there is no such recovery report")
        yield document

    async def disturb(call: Call) -> Answers:
        yield await chaos.disturb(box, call["kind"], _worker(box, call), call)

    async def drain(call: Call) -> Answers:
        worker = _worker(box, call, WorkerPhase.READY)
        box.ask("drain", worker)
        slot = box.core.state.workers[worker]
        await box.until(lambda: slot.phase != WorkerPhase.DRAINING and box.is_settled(worker))
        if slot.phase not in (WorkerPhase.DRAINED, WorkerPhase.READY):
            raise LumenboxError(f"worker {worker} died while it was drained: it is {slot.phase}")
        yield {"worker": worker, "state": slot.phase.value}

    async def resume(call: Call) -> Answers:
        worker = _worker(box, call, WorkerPhase.DRAINED)
        box.ask("resume", worker)
        yield {"worker": worker, "state": box.core.state.workers[worker].phase.value}

    async def restart(call: Call) -> Answers:
        worker = _worker(box, call)
        await box.renew(worker, "restart")
        yield {"worker": worker, "state": box.core.state.workers[worker].phase.value}

    async def upgrade(call: Call) -> Answers:
        _require_begun(box)
        await box.upgrade(dict(call.get("environment", {})))
        yield {"workers": box.num_ready}

    return {
        "status": status,
        "down": down,
        "events": events,
        "report": report,
        "chaos": disturb,
        "drain": drain,
        "resume": resume,
        "restart": restart,
        "upgrade": upgrade,
    }


def _worker(box: Box, call: Call, phase: WorkerPhase | None = None) -> int:
    """The worker that a call names; it must exist, and be in `phase` if one is given."""
    _require_begun(box)
    worker = int(call.get("worker", -1))
    if worker not in box.core.state.workers:
        raise LumenboxError(f"there is no worker {worker}; the box has 0 to {box.config.workers - 1}")
    state = box.core.state.workers[worker].phase
    if phase is not None and state != phase:
        raise LumenboxError(f"worker {worker} is {state}, not {phase}")
    return worker


def _require_begun(box: Box) -> None:
    if not box.has_begun:
        raise LumenboxError("the box is loading its model; try again when it is ready")
