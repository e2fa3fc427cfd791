"""What the box tells about itself: numbered events, and one report for each recovery."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from typing import Any

from lumenbox.coordinator.figures import Figures
from lumenbox.core.commands import Planned

KEPT_EVENTS = 4096
KEPT_REPORTS = 256
WAY_NAMES = {"hold": "recompute", "end": "recompute"}


class EventLog:
    """The last events, numbered from 1, and a way to wait for more."""

    def __init__(self) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=KEPT_EVENTS)
        self._seq = 0
        self._more = asyncio.Event()

    def add(self, kind: str, **fields: Any) -> None:
        """Tell an event."""
        self._seq += 1
        self._events.append({"seq": self._seq, "t": time.time(), "kind": kind, **fields})
        self._more.set()

    def since(self, seq: int) -> list[dict[str, Any]]:
        """Events with a larger number."""
        return [event for event in self._events if event["seq"] > seq]

    async def wait(self, seq: int) -> None:
        """Until there is one with a larger number."""
        while self._seq <= seq:
            self._more.clear()
            await self._more.wait()


class Recovery:
    """One recovery in the making; `document` is the report of CONTRACT §2, unknown fields None.

    Requests whose way is `migrate` decode on where they are until they have moved; the others wait from the start.
    """

    def __init__(self, figures: Figures, number: int, plan: Planned, covered: dict[str, Any]) -> None:
        self._figures = figures
        self._planned = self._failed = time.monotonic()
        self._open: dict[int, dict[str, Any]] = {}
        self._staying: set[int] = set()
        """Those of the open ones that migrate and have not left yet."""
        self._loaded: dict[int, float] = {}
        """When the pages of a request were there."""
        self._died: float | None = None
        """When its worker did, if it did: requests may have moved for a while before."""
        self.worker = plan.worker
        self.life = (plan.worker, plan.incarnation, plan.cause)
        self.document: dict[str, Any] = {
            "schema": 1,
            "id": number,
            "worker": plan.worker,
            "incarnation": plan.incarnation,
            "cause": plan.cause,
            "strategy": plan.strategy,
            "t_failed": time.time(),
            "detect_s": 0.0,
            "fence_s": 0.0,
            "plan_s": 0.0,
            "restore_s": None,
            "tail_prefill_s": None,
            "first_token_s": None,
            "respawn_s": None,
            "recovered_s": None,
            "checkpoint": covered,
            "restored_bytes": 0,
            "restore_bytes_s": None,
            "requests": [],
            "lost_tokens": 0,
            "duplicated_tokens": 0,
            "failed_requests": 0,
        }

    def planned(self, plan: Planned) -> None:
        """Count those of a plan that cannot go on."""
        ended = sum(1 for _, way, _ in plan.ways if way == "end")
        self.document["failed_requests"] += ended
        self._figures.recoveries["end", "ended"] += ended

    def fenced(self, noticed: float, failed: float, fenced: float) -> None:
        """Its worker died, or was made to: what of it is planned now follows the fence."""
        self._died = failed
        self._planned = now = time.monotonic()
        if not self.document["requests"]:  # else it began with requests that moved before
            self._failed = failed
            self.document["t_failed"] = time.time() - (now - failed)
            self.document["detect_s"] = noticed - failed
        self.document["fence_s"] = fenced - noticed
        self.document["plan_s"] = now - fenced
        self._figures.failures[self.document["cause"]] += 1
        for phase in ("detect", "fence", "plan"):
            self._figures.phase_s[phase].observe(self.document[f"{phase}_s"])

    @property
    def ways(self) -> Counter[str]:
        """How many requests take each way."""
        return Counter(row["way"] for row in self.document["requests"])

    def interrupted(self, rid: int, name: str, way: str, heir: int, tokens: int, kept: int, holders: list[int]) -> None:
        """Enter one interrupted request: its way, how many of its tokens need not be computed again, its holders."""
        row: dict[str, Any] = {
            "id": name,
            "way": WAY_NAMES.get(way, way),
            "from_worker": self.worker,
            "to_worker": heir if heir >= 0 else None,
            "holders": holders,
            "tokens_before": tokens,
            "restored_tokens": 0,
            "recomputed_tokens": tokens - kept,
            "stall_s": None,
        }
        self.document["requests"].append(row)
        self._open[rid] = row
        if way == "migrate":
            self._staying.add(rid)

    def stays(self, rid: int) -> None:
        """A move that was under way does not happen, or another plan takes its place."""
        if rid in self._open and self._open[rid]["way"] == "migrate":
            self._drop(rid)
            self._close_if_done(time.monotonic())

    def _drop(self, rid: int) -> None:
        self._staying.discard(rid)
        if (row := self._open.pop(rid, None)) is not None:
            self.document["requests"].remove(row)

    def moved(self, rid: int, tokens: int) -> None:
        """One that migrates has left its worker."""
        if (row := self._open.get(rid)) is not None and rid in self._staying:
            self._staying.remove(rid)
            row["tokens_before"] = row["recomputed_tokens"] = tokens
            row["restored_tokens"] = 0

    def restored(self, rid: int, tokens: int, num_bytes: int, seconds: float) -> None:
        """An heir has loaded sealed pages for `tokens` tokens."""
        if (row := self._open.get(rid)) is not None:
            row["restored_tokens"] = tokens
            row["recomputed_tokens"] = row["tokens_before"] - tokens
            self._loaded[rid] = time.monotonic()
            document = self.document
            document["restored_bytes"] += num_bytes
            document["restore_s"] = (document["restore_s"] or 0.0) + seconds
            if document["restore_s"]:
                document["restore_bytes_s"] = round(document["restored_bytes"] / document["restore_s"])

    def first_token(self, rid: int, heir: int, last_token: float) -> bool:
        """An interrupted request draws a token; `last_token` is when its client had the one before. Returns whether it
        is to come yet: one that migrates still decodes where it was."""
        row = self._open.get(rid)
        if row is None:
            return False
        if rid in self._staying:
            return True
        del self._open[rid]
        now = time.monotonic()
        row["to_worker"], row["stall_s"] = heir, now - last_token
        self._count(row)
        if self.document["first_token_s"] is None:
            first_token_s = self.document["first_token_s"] = now - self._failed
            if row["way"] != "migrate":
                self._figures.phase_s["first_token"].observe(first_token_s)
            if row["way"] != "reattach":
                self.document["tail_prefill_s"] = now - self._loaded.get(rid, self._planned)
        self._close_if_done(now)
        return False

    def _count(self, row: dict[str, Any]) -> None:
        if self.document["cause"] == "rebalance":
            return
        figures = self._figures
        figures.stall_s.observe(row["stall_s"])
        figures.recoveries[row["way"], "resumed"] += 1
        source = "reattach" if row["way"] == "reattach" else "restore"
        figures.tokens[source] += row["tokens_before"] - row["recomputed_tokens"]
        figures.tokens["recompute"] += row["recomputed_tokens"]

    def gone(self, rid: int) -> None:
        """An interrupted request ended, by its client or by an error."""
        if rid in self._staying:
            self.stays(rid)  # it was never interrupted
        if (row := self._open.pop(rid, None)) is not None:
            self._figures.recoveries[row["way"], "ended"] += 1
            self._close_if_done(time.monotonic())

    def reborn(self) -> None:
        """The next incarnation is ready."""
        if self._died is not None and self.document["respawn_s"] is None:
            respawn_s = self.document["respawn_s"] = time.monotonic() - self._died
            self._figures.respawn_s.observe(respawn_s)

    def _close_if_done(self, now: float) -> None:
        if not self._open:
            if self.document["restore_s"] is not None and self.document["recovered_s"] is None:
                self._figures.phase_s["restore"].observe(self.document["restore_s"])
            self.document["recovered_s"] = now - self._failed


class Recoveries:
    """The last recoveries, by number."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self._kept: deque[Recovery] = deque(maxlen=KEPT_REPORTS)
        self._count = 0

    def open(self, plan: Planned, covered: dict[str, Any]) -> Recovery:
        """Begin a report when the plan stands; `covered` is how well KV checkpoints covered the box before it."""
        self._count += 1
        recovery = Recovery(self._figures, self._count, plan, covered)
        self._kept.append(recovery)
        return recovery

    def begun(self, plan: Planned) -> Recovery | None:
        """The report that this plan goes on with: requests moved away before their worker was replaced."""
        return next((r for r in self._kept if r.life == (plan.worker, plan.incarnation, plan.cause)), None)

    def stays(self, rid: int) -> None:
        for recovery in self._kept:
            recovery.stays(rid)

    def moved(self, rid: int, tokens: int) -> None:
        for recovery in self._kept:
            recovery.moved(rid, tokens)

    def first_token(self, rid: int, heir: int, last_token: float) -> bool:
        """Whether a report still waits for it."""
        return any([recovery.first_token(rid, heir, last_token) for recovery in self._kept])

    def restored(self, rid: int, tokens: int, num_bytes: int, seconds: float) -> None:
        for recovery in self._kept:
            recovery.restored(rid, tokens, num_bytes, seconds)

    def gone(self, rid: int) -> None:
        for recovery in self._kept:
            recovery.gone(rid)

    def reborn(self, worker: int) -> None:
        for recovery in self._kept:
            if recovery.worker == worker:
                recovery.reborn()

    def find(self, which: str) -> dict[str, Any] | None:
        """The report of that number, or the last one of a recovery: moves for balance alone come and go."""
        wanted = [r.document for r in self._kept if which == str(r.document["id"])]
        if which == "last":
            wanted = [r.document for r in self._kept if r.document["cause"] != "rebalance"]
        return wanted[-1] if wanted else None
