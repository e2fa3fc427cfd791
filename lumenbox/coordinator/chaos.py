"""Faults on demand. Each is verified to have taken hold before it is reported."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lumenbox.errors import LumenboxError
from lumenbox.memory import proc
from lumenbox.wire import frames

if TYPE_CHECKING:
    from lumenbox.coordinator.box import Box
    from lumenbox.coordinator.link import WorkerLink

VERIFY_S = 10.0


async def disturb(box: Box, kind: str, worker: int, call: dict[str, Any]) -> dict[str, Any]:
    """Do `kind` to a worker and wait until it shows; returns what was seen."""
    link = box.slots[worker].link
    if link is None or not link.ready:
        raise LumenboxError(f"worker {worker} has no running process to disturb")
    match kind:
        case "kill":
            signum = signal.Signals[call.get("signal", "SIGKILL")]
            _mark(link, kind)
            link.kill(signum)
            evidence = await _shown(lambda: link.exited.done() or proc.runs_no_user_code(link.pid), "exiting")
        case "hang":
            _mark(link, kind)
            link.kill(signal.SIGSTOP)
            # one that was late already is fenced as soon as it stands still: then it shows as dead
            evidence = await _shown(lambda: link.is_stopped() or proc.runs_no_user_code(link.pid), "stopped")
        case "slow":
            factor = float(call["factor"])
            _mark(link, kind)
            link.send(frames.Disturb("slow", factor))
            evidence = await _shown(lambda: _slow_factor(link) == factor, f"steps stretched {factor:g} times")
        case "lose":
            _mark(link, kind)
            box.slots[worker].device_lost = True
            link.kill()
            evidence = await _shown(
                lambda: link.exited.done() or proc.runs_no_user_code(link.pid), "exiting, pool gone"
            )
        case "corrupt":
            evidence = f"{_corrupt(box, worker)} sealed pages damaged"
        case "clear":
            link.disturbed, link.disturbed_at = "", None
            link.kill(signal.SIGCONT)
            link.send(frames.Disturb("clear"))
            evidence = await _shown(lambda: not link.is_stopped() and _slow_factor(link) == 1.0, "undisturbed")
        case _:
            raise LumenboxError(f"unknown fault {kind!r}")
    box.events.add("chaos", worker=worker, fault=kind, pid=link.pid)
    return {"worker": worker, "fault": kind, "pid": link.pid, "verified": evidence}


def _corrupt(box: Box, worker: int) -> int:
    """Flip a byte in every sealed page of the requests that the worker serves."""
    kept = box.core.state.arena.checkpoints
    served = [kept[req] for req in box.core.state.workers[worker].requests if req in kept]
    slots = [page for checkpoint in served for page in checkpoint.slots[: checkpoint.sealed]]
    if not slots:
        raise LumenboxError(f"worker {worker} serves no request with a sealed page")
    return box.arena.corrupt(slots)


def _mark(link: WorkerLink, kind: str) -> None:
    link.disturbed, link.disturbed_at = kind, time.monotonic()


def _slow_factor(link: WorkerLink) -> float:
    status = link.status()
    return status.slow_milli / 1000 if status else -1.0


async def _shown(holds: Callable[[], bool], what: str) -> str:
    """Wait until a fault is visible in the kernel or on the status page; there is nothing to be notified by."""
    try:
        async with asyncio.timeout(VERIFY_S):
            while not holds():
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise LumenboxError(f"the fault did not take hold: not {what} after {VERIFY_S:.0f} s") from None
    return what
