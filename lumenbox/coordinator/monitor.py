"""The watch: looks at each worker's heartbeat and at the kernel's view of it, and tells the core of breaches only."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lumenbox.core import events as e
from lumenbox.core.cost import Shape
from lumenbox.core.health import CONFIRM_S, SPIN_S, deadline_s
from lumenbox.memory import proc
from lumenbox.memory.status import Phase, Status

if TYPE_CHECKING:
    from lumenbox.coordinator.box import Box
    from lumenbox.coordinator.link import WorkerLink

PERIOD_S = 0.01
LATE_S = 0.1
"""A look that comes so late says more about the coordinator than about its workers: sockets are read first."""
BIRTH_DEADLINE_S = 60.0


@dataclass(slots=True, frozen=True)
class Suspicion:
    """A worker found late in the phase that began at `since_ns`: when, and how active its threads had been by then."""

    since_ns: int
    at: float
    active_ns: int
    stolen_s: list[float]


async def watch(box: Box) -> None:
    """Look at every worker, a hundred times a second, for ever."""
    due = time.monotonic()
    while True:
        due = max(due + PERIOD_S, time.monotonic())
        await asyncio.sleep(due - time.monotonic())
        if time.monotonic() - due > LATE_S:
            await asyncio.sleep(0)  # a turn of the loop, in which every socket is read
            continue
        for slot in box.slots:
            if slot.link is not None:
                _look(box, slot.link)


def _look(box: Box, link: WorkerLink) -> None:
    if link.is_exiting():
        box.on_exit(link, "exiting")
        return
    status = link.status()
    if status is None:
        return
    late = _late_s(box, link, status)
    if late <= 0:
        link.suspicion = None
    elif late > SPIN_S or _stands_still(link, status):
        box.tell(e.StepOverdue(time.monotonic(), link.worker, link.incarnation, status.step, late))


def _stands_still(link: WorkerLink, status: Status) -> bool:
    """Whether no thread of the worker has run, or waited to, for a while since it was first found late. What the
    hypervisor took of a core meanwhile may have been the worker's."""
    now, active_ns, stolen_s = time.monotonic(), proc.active_ns(link.pid), proc.stolen_s()
    if link.suspicion is None or link.suspicion.since_ns != status.since_ns:
        link.suspicion = Suspicion(status.since_ns, now, active_ns, stolen_s)
    found = link.suspicion
    taken_s = max((b - a for a, b in zip(found.stolen_s, stolen_s, strict=False)), default=0.0)
    return now - found.at - (active_ns - found.active_ns) / 1e9 - taken_s > CONFIRM_S


def _late_s(box: Box, link: WorkerLink, status: Status) -> float:
    """How far a worker is beyond its deadline; waiting for a core is not held against it."""
    now = time.monotonic()
    worker, model = box.core.state.workers[link.worker], box.core.state.model
    since = status.since_ns / 1e9
    if not link.ready:
        late = now - link.born - BIRTH_DEADLINE_S
    elif status.phase == Phase.COMPUTE:
        shape = Shape(status.decodes, status.prefill_tokens, status.context_tokens)
        late = now - since - deadline_s(model, worker.pace, shape)
    elif worker.requests:
        # Between steps. One that waits in `send` does so for us, and goes on as soon as its socket is read: what counts
        # is the silence since then.
        decodes = Shape(len(worker.requests), 0, worker.context_tokens)
        late = now - max(since, link.last_assign, link.last_heard) - deadline_s(model, worker.pace, decodes)
    else:
        return 0.0
    return late - link.waited_s(status.tid, status.waited_ns) if late > 0 else 0.0
