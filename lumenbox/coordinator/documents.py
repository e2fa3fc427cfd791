"""The JSON that the box shows of itself (CONTRACT §2)."""

from __future__ import annotations

import os
import time
from math import isfinite
from typing import TYPE_CHECKING, Any

from lumenbox.coordinator.slots import Slot
from lumenbox.core import coverage
from lumenbox.core.state import Worker, WorkerPhase

if TYPE_CHECKING:
    from lumenbox.coordinator.box import Box


def state(box: Box) -> dict[str, Any]:
    """The document of `status --json` and of /lumenbox/state."""
    workers = [_worker(box, slot) for slot in box.slots]
    running = sum(row["running"] for row in workers)
    return {
        "schema": 1,
        "endpoint": box.endpoint,
        "pid": os.getpid(),
        "model": box.config.served_name,
        "recovery": box.config.recovery,
        "uptime_s": round(time.monotonic() - box.started, 3),
        "state": box_state(box),
        "page_size": box.config.page_size,
        "max_model_len": box.max_model_len,
        "exact": bool(box.report and box.report.exact),
        "numeric_class": box.report.numeric_class if box.report else "",
        "counters": {
            "aborts": box.counters["aborts"],
            "generated_tokens": box.ledger.generated_tokens,
            "worker_deaths": box.core.state.deaths,
            "preemptions": sum(slot.last_frame.preemptions for slot in box.slots if slot.last_frame),
        },
        "workers": workers,
        "requests": {
            "running": running,
            "waiting": len(box.core.state.requests) - running,
            "finished": box.counters["finished"],
            "failed": box.counters["failed"],
        },
        "checkpoint": checkpoints(box),
        "assist": {"active": 0, "acceptance": None},
    }


def box_state(box: Box) -> str:
    """One word for the whole box: ready only if every slot serves."""
    phases = [worker.phase for worker in box.core.state.workers.values()]
    if box.core.state.closing:
        return "draining"
    if all(phase == WorkerPhase.READY for phase in phases):
        return "ready"
    if WorkerPhase.READY in phases:
        return "degraded"
    return "dead" if box.core.state.has_served else "loading"


def checkpoints(box: Box) -> dict[str, Any]:
    """How well requests are covered now (EVALUATION §3), for status and for the report of a recovery."""
    state = box.core.state
    computed = {rid: tokens for slot in box.slots for rid, tokens in slot.mirror.computed.items()}
    balance = coverage.holder_balance(state)
    held = [worker.held_pages for worker in state.workers.values()]
    return {
        "coverage": round(coverage.coverage(state), 4),
        "holder_balance": round(balance, 3) if isfinite(balance) else float(max(held)),
        "lag_tokens": round(coverage.lag_tokens(state, computed), 1),
        "evictions": state.arena.evictions,
        "restore_bytes_s": round(state.restore_bytes_s),
    }


def _worker(box: Box, slot: Slot) -> dict[str, Any]:
    worker: Worker = box.core.state.workers[slot.worker]
    now = time.monotonic()
    budget_pages = box.core.state.config.checkpoints.budget_pages
    return {
        "id": slot.worker,
        "state": worker.phase.value,
        "pid": slot.link.pid if slot.link else None,
        "incarnation": worker.incarnation,
        "device": "cpu",
        "running": len(worker.requests) - len(worker.backlog),
        "waiting": len(worker.backlog),
        "pages_used": slot.mirror.pages_used,
        "pages_cached": slot.mirror.pages_cached,
        "pages_total": worker.pages,
        "restarts": worker.restarts,
        "arena_pages": worker.held_pages,
        "arena_budget_pages": budget_pages,
        "arena_bytes": worker.held_pages * box.core.state.config.checkpoints.page_bytes,
        "sealed_bytes": slot.sealed.total,
        "sealed_bytes_s": round(slot.sealed.per_s(now)),
        "restored_bytes": slot.restored_bytes,
        "restore_s": round(slot.restoring_s, 6),
        "restore_bytes_s": round(slot.restored_bytes / slot.restoring_s) if slot.restoring_s else None,
        "step_ms": round(1000 * slot.step_s, 3),
        "tokens": slot.drawn.total,
        "tokens_per_s": round(slot.drawn.per_s(now), 1),
    }
