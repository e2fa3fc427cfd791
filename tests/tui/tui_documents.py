"""A box in the middle of a recovery, as its documents tell it."""

from __future__ import annotations

from typing import Any

from lumenbox.tui.history import History
from lumenbox.tui.snapshot import Controls, Snapshot

NOON = 1_730_030_400.0


def worker(number: int, state: str = "ready", **fields: Any) -> dict[str, Any]:
    return {
        "id": number,
        "state": state,
        "pid": 4100 + number,
        "incarnation": 1,
        "device": "cpu",
        "running": 2,
        "waiting": 0,
        "pages_used": 120,
        "pages_cached": 64,
        "pages_total": 512,
        "restarts": 0,
        "arena_pages": 0,
        "arena_budget_pages": 0,
        "step_ms": 5.25,
        "tokens_per_s": 380.4,
    } | fields


def state(*workers: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "endpoint": "http://127.0.0.1:8000",
        "pid": 4000,
        "model": "smollm2-135m",
        "recovery": "box",
        "uptime_s": 3725.9,
        "state": "degraded",
        "page_size": 16,
        "exact": True,
        "numeric_class": "avx2",
        "counters": {"aborts": 0, "generated_tokens": 1000, "worker_deaths": 1},
        "workers": list(workers) or four_workers(),
        "requests": {"running": 6, "waiting": 1, "finished": 120, "failed": 0},
        "checkpoint": {"coverage": 0.0, "holder_balance": 0.0, "lag_tokens": 0},
        "assist": {"active": 0, "acceptance": None},
    } | fields


def four_workers() -> list[dict[str, Any]]:
    idle = {"running": 0, "pages_used": 0, "step_ms": 0.0, "tokens_per_s": 0.0}
    return [
        worker(0),
        worker(1, "loading", incarnation=2, restarts=1, pid=None, **idle),
        worker(2, waiting=1, pages_used=500),
        worker(3, "quarantined", pages_total=65536, **idle),
    ]


def interrupted(number: int, way: str = "reattach", **fields: Any) -> dict[str, Any]:
    return {
        "id": f"req-{number}",
        "way": way,
        "from_worker": 1,
        "to_worker": 2,
        "tokens_before": 57,
        "restored_tokens": 0,
        "recomputed_tokens": 9,
        "stall_s": 0.081,
    } | fields


def report(**fields: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "id": 3,
        "worker": 1,
        "incarnation": 1,
        "cause": "signal",
        "strategy": "box",
        "t_failed": NOON,
        "detect_s": 0.010,
        "fence_s": 0.020,
        "plan_s": 0.010,
        "restore_s": None,
        "tail_prefill_s": None,
        "first_token_s": 0.120,
        "respawn_s": 0.400,
        "recovered_s": 0.160,
        "requests": [interrupted(1), interrupted(2), interrupted(3, "recompute", stall_s=0.140)],
        "lost_tokens": 0,
        "duplicated_tokens": 0,
        "failed_requests": 0,
    } | fields


def event(seq: int, kind: str, number: int | None = None, **fields: Any) -> dict[str, Any]:
    return {"seq": seq, "t": NOON + seq, "kind": kind} | ({} if number is None else {"worker": number}) | fields


def events() -> tuple[dict[str, Any], ...]:
    return (
        event(1, "worker_ready", 0, why="started"),
        event(2, "chaos", 1, fault="kill", pid=4101),
        event(3, "worker_dead", 1, why="signal"),
        event(4, "recovery", 1, cause="signal", report=3, requests=3),
    )


def history() -> History:
    past = History()
    for second, tokens in enumerate([0, 100, 300, 600, 1000, 1000, 1400]):
        past = past.after(NOON + second, tokens)
    return past


def snapshot(controls: Controls | None = None, **fields: Any) -> Snapshot:
    values = {"state": state(), "events": events(), "report": report(), "history": history()} | fields
    return Snapshot(controls=controls, **values)
