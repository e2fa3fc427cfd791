"""The box: tells the core what happens, performs what it commands, and moves tokens from frames to streams.

Everything here runs on one event loop and never blocks it. Decisions are the core's (lumenbox.core.machine).
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, assert_never

import msgspec

from lumenbox.config import BoxConfig
from lumenbox.coordinator import births, documents
from lumenbox.coordinator.arena import ArenaStore, budget_pages
from lumenbox.coordinator.figures import Figures
from lumenbox.coordinator.forkserver import ForkServer, ForkServerGone
from lumenbox.coordinator.link import WorkerLink
from lumenbox.coordinator.live_stream import LiveStream
from lumenbox.coordinator.slots import Slot
from lumenbox.coordinator.streams import GenerationSpec, ModelInfo
from lumenbox.coordinator.telling import EventLog, Recoveries
from lumenbox.core import commands as c
from lumenbox.core import events as e
from lumenbox.core.commands import AnyCommand
from lumenbox.core.events import AnyEvent
from lumenbox.core.ledger import Entry, Ledger
from lumenbox.core.machine import EARLY_DEATHS, PLANNED_CAUSES, Core
from lumenbox.core.state import CoreConfig, WorkerPhase
from lumenbox.errors import LumenboxError, RequestError
from lumenbox.journal import Journal
from lumenbox.memory import sizing
from lumenbox.memory.layout import LoadReport
from lumenbox.memory.status import Phase
from lumenbox.models.facts import ModelFacts
from lumenbox.wire import frames

log = logging.getLogger("lumenbox")

CRASH_SIGNALS = {
    signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP,
}  # fmt: skip
END_S = 2.0
"""For a killed process to be gone; no process is left when `up` returns."""
REFUSALS = {
    "queue_full": (429, "the queue is full; try again later"),
    "loading": (503, "the box is loading; try again shortly"),
    "draining": (503, "the box is shutting down"),
    "no_worker": (503, "no worker is left to serve this"),
}
LOSSES = {
    "worker_lost": (503, "the worker serving this request was lost and the request cannot go on"),
    "worker_died": (500, "this request was running whenever its worker crashed, and is not tried again"),
}


class Box:
    """See module docstring. Implements `streams.Service`. Make it on the running loop, `start` it, `close` it."""

    def __init__(
        self,
        config: BoxConfig,
        facts: ModelFacts,
        token_bytes: Sequence[bytes],
        new_fork_server: Callable[[dict[str, str]], ForkServer],
    ) -> None:
        self.config = config
        self.facts = facts
        self.events = EventLog()
        self.figures = Figures()
        self.recoveries = Recoveries(self.figures)
        self.ledger = Ledger(token_bytes)
        self.slots = [Slot(worker) for worker in range(config.workers)]
        self.counters = {"aborts": 0, "finished": 0, "failed": 0}
        self.started = time.monotonic()
        self.report: LoadReport | None = None
        self.weight_fd = -1
        self.endpoint = ""
        self.has_begun = False
        """The model is loaded and the first births are under way: from now on its workers can be spoken of."""
        self.ended: asyncio.Future[c.Exit] = asyncio.get_running_loop().create_future()
        self._token_bytes = token_bytes
        self._streams: dict[int, LiveStream] = {}
        self._names: dict[int, str] = {}
        self._new_fork_server = new_fork_server
        self._environment: dict[str, str] = {}
        self._has_given_up = False
        self._oom_kills = self._oom_kills_before = sizing.oom_kills()
        """Those accounted for, and those that there were a beat ago: a worker's death is noticed within that time."""
        self._old_servers: list[ForkServer] = []
        """That an upgrade is about to replace, or could not wholly."""
        self._cold_deaths = 0  # of fork servers before they were warm, one after the other
        self._next_rid = 1
        self._seeds = random.Random(config.seed)
        self._tasks: asyncio.TaskGroup
        self._loop = asyncio.get_running_loop()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._poison_text = next((f.partition(":")[2] for f in config.faults if f.startswith("die_on_text:")), None)
        self._changed = asyncio.Event()
        self.core = Core(self._core_config(0, 0))
        self.arena = ArenaStore()
        self.journal = Journal(config.run_dir / "journal")

    # -- life ----------------------------------------------------------------------------------------------------

    def _core_config(self, budget_pages: int, page_bytes: int) -> CoreConfig:
        config = self.config
        return CoreConfig(
            workers=config.workers,
            page_size=config.page_size,
            max_queue=config.max_queue,
            max_model_len=config.max_model_len or self.facts.context_length,
            recovery=config.recovery,
            respawn=config.respawn,
            max_num_seqs=config.max_num_seqs,
            checkpoints=msgspec.structs.replace(config.checkpoints, budget_pages=budget_pages, page_bytes=page_bytes),
        )

    async def start(self, fork_server: ForkServer, tasks: asyncio.TaskGroup) -> None:
        """Load the model and bring up every worker. Raises StartupError; the box is ready when this returns."""
        self._tasks = tasks
        self._adopt_server(fork_server)
        self._adopt_weights(*await births.load_weights(fork_server, self.config))
        assert self.report is not None
        self.max_model_len = births.bound_context(self.config, self.facts, self.report)
        if not self.report.exact and self.config.exact == "auto":
            log.warning("exact mode is off: %s", self.report.inexact_reason)
        await births.allocate_pools(self.config, self.report, self.facts, self.slots)
        await self._allocate_arena(self.report)
        for slot in self.slots:
            self._spawn(slot, 1, keep_pool=False)
        self.has_begun = True
        await self.until(lambda: self.core.state.has_served or self.is_over)

    async def _allocate_arena(self, report: LoadReport) -> None:
        """Size and take the arena. Only now is the core's configuration complete; nothing has happened yet but
        refusals."""
        budget = budget_pages(self.config, report)
        await asyncio.to_thread(self.arena.allocate, budget * self.config.workers, report.page.page_bytes)
        self.core = Core(self._core_config(budget, report.page.page_bytes))
        self.journal.roll()

    def close(self) -> None:
        """Kill what is left, wait for its end (but not for ever), and give everything back."""
        for handle in self._timers.values():
            handle.cancel()
        for slot in self.slots:
            if slot.link is not None:
                slot.link.kill()
        for slot in self.slots:
            if slot.link is not None:
                slot.link.await_end(END_S)
            slot.close()
        self.arena.close()
        if self.weight_fd >= 0:
            os.close(self.weight_fd)
            self.weight_fd = -1
        servers = [*self._old_servers, self._fork_server] if hasattr(self, "_fork_server") else []
        for server in servers:
            server.close()
            server.await_end(END_S)
        self.journal.close()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a change of the core makes the condition true."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    # -- streams.Service -----------------------------------------------------------------------------------------

    max_model_len = 0

    @property
    def info(self) -> ModelInfo:
        length = self.max_model_len or self.config.max_model_len or self.facts.context_length
        return ModelInfo(self.config.served_name, length, self.facts.vocab_size, self.config.created)

    def submit(self, spec: GenerationSpec) -> LiveStream:
        """See `streams.Service.submit`."""
        seed = self._seeds.getrandbits(63) if spec.seed is None else spec.seed
        entries = [self._open_entry(spec, prompt, seed, choice) for prompt in spec.prompts for choice in range(spec.n)]
        stream = LiveStream(entries, spec.n, self._abandon)
        self._streams.update((entry.rid, stream) for entry in entries)
        news = tuple(e.NewRequest(x.rid, x.num_prompt, x.params.max_tokens) for x in entries)
        for command in self.tell(e.RequestArrived(time.monotonic(), news, spec.priority)):
            if isinstance(command, c.Refuse):
                status, message = REFUSALS[command.code]
                raise RequestError(message, status=status, code=command.code, retry_after_s=command.retry_after_s)
        return stream

    def state(self) -> dict[str, Any]:
        """See `streams.Service.state`."""
        return documents.state(self)

    def _open_entry(self, spec: GenerationSpec, prompt: list[int], seed: int, choice: int) -> Entry:
        rid, self._next_rid = self._next_rid, self._next_rid + 1
        params = msgspec.structs.replace(spec.params, seed=seed, choice=choice)
        entry = self.ledger.open(rid, params, prompt, spec.stop, spec.include_stop, spec.priority)
        entry.arrived = time.monotonic()
        return entry

    def _abandon(self, rids: list[int]) -> None:
        for rid in rids:
            if rid in self.ledger.entries:
                self.counters["aborts"] += 1
                self._forget(rid)
                self.tell(e.ClientGone(time.monotonic(), rid))

    def _forget(self, rid: int) -> None:
        self.ledger.close(rid)
        self._streams.pop(rid, None)
        self.recoveries.gone(rid)

    # -- core ----------------------------------------------------------------------------------------------------

    def tell(self, event: AnyEvent) -> list[AnyCommand]:
        """Hand an event to the core and perform its answer."""
        commands = self.journal.append(self.core, event)
        for command in commands:
            self._perform(command)
        self._changed.set()
        return commands

    def _perform(self, command: AnyCommand) -> None:  # noqa: PLR0912 (one case a command)
        match command:
            case c.Assign():
                self._assign(command)
            case c.Cancel(worker=worker, req=req, epoch=epoch) | c.MoveOut(worker=worker, req=req, epoch=epoch):
                self._send(worker, frames.Cancel(req, epoch))
            case c.Refuse(reqs=reqs):
                for req in reqs:
                    self._forget(req)
            case c.ReserveSlots():
                self._reserve(command)
            case c.DropSlots(worker=worker, req=req, epoch=epoch):
                if command.holders:
                    told = {"request": f"req-{req}", "holders": command.holders, "pages": command.pages}
                    self.events.add("checkpoint_evicted", worker=worker, **told)
                self._send(worker, frames.Release(req, epoch))
            case c.PreRestore():
                self._preload(command)
            case c.SetSealRate(worker=worker, bytes_s=bytes_s):
                self._send(worker, frames.SealRate(bytes_s))
            case c.EndStream(req=req, code=code):
                self._end_stream(req, code)
            case c.Fence() | c.Spawn() if self._has_given_up:
                pass
            case c.Fence():
                self._tasks.create_task(self._fence(command))
            case c.Spawn(worker=worker, incarnation=incarnation, keep_pool=keep_pool):
                self._spawn(self.slots[worker], incarnation, keep_pool)
            case c.SetTimer(name=name, at=at):
                self._set_timer(name, at)
            case c.Changed(worker=worker, state=state, why=why):
                self._tell_change(worker, state, why)
            case c.Planned(ways=ways):
                if any(way == "migrate" for _, way, _ in ways):  # else it is told by _fence, which has the times
                    self._tell_recovery(command, documents.checkpoints(self))
            case c.Stays(req=req):
                if (entry := self.ledger.entries.get(req)) is not None:
                    entry.is_rebalanced = False
                    self.recoveries.stays(req)
            case c.Exit():
                if not self.ended.done():
                    self.ended.set_result(command)
            case _:
                assert_never(command)

    def _send(self, worker: int, message: frames.ToWorker) -> None:
        link = self.slots[worker].link
        if link is not None:
            link.send(message)

    def _assign(self, command: c.Assign) -> None:
        entry = self.ledger.entries[command.req]
        if command.epoch > entry.epoch:
            entry.epoch = command.epoch
            if not entry.is_rebalanced:
                entry.recoveries += 1
                self._streams[entry.rid].recoveries += 1
            entry.is_rebalanced = False
        slot = self.slots[command.worker]
        entry.slots = list(command.slots)
        if command.way == "reattach":
            slot.returning[entry.rid] = command.sealed
        else:
            crcs = self.arena.checksums(entry.slots[: command.sealed], slot.pool_identity)
            load = command.way == "restore"
            entry.loading = len(crcs) if load else 0
            self._send(command.worker, frames.Assign(births.placed(entry, crcs, load, self._is_poison(entry))))
            if load and not crcs:
                self._tell_nothing_restored(command.worker, command.req, command.epoch)

    def _tell_nothing_restored(self, worker: int, req: int, epoch: int) -> None:
        """No page of it is usable where it goes (another numeric class): the core waits for an answer all the same."""
        event = e.RestoreDone(time.monotonic(), worker, req, epoch, 0, 0, 0.0)
        self._loop.call_soon(self.tell, event)

    def _reserve(self, command: c.ReserveSlots) -> None:
        if (entry := self.ledger.entries.get(command.req)) is not None:
            del entry.slots[command.first :]
            entry.slots += command.slots
        self._send(command.worker, frames.Reserve(command.req, command.epoch, command.first, list(command.slots)))

    def _preload(self, command: c.PreRestore) -> None:
        entry = self.ledger.entries[command.req]
        crcs = self.arena.checksums(list(command.slots), self.slots[command.worker].pool_identity)
        if not crcs:
            self._tell_nothing_restored(command.worker, command.req, command.epoch)
            return
        placed = births.placed(entry, crcs, load=True)
        ahead = msgspec.structs.replace(placed, epoch=command.epoch, slots=list(command.slots))
        self._send(command.worker, frames.Preload(ahead))

    def _is_poison(self, entry: Entry) -> bool:
        if self._poison_text is None:
            return False
        text = b"".join(self._token_bytes[token] for token in entry.tokens[: entry.num_prompt])
        return self._poison_text.encode() in text

    def _end_stream(self, req: int, code: str) -> None:
        status, message = LOSSES[code]
        stream = self._streams[req]
        self.counters["failed"] += 1
        self._forget(req)
        retry = 1 if status == 503 else None
        stream.failed(req, RequestError(message, status=status, code=code, retry_after_s=retry))

    def _set_timer(self, name: str, at: float) -> None:
        if (old := self._timers.pop(name, None)) is not None:
            old.cancel()
        self._timers[name] = self._loop.call_later(max(0.0, at - time.monotonic()), self._timer_fired, name)

    def _timer_fired(self, name: str) -> None:
        del self._timers[name]
        self.tell(e.TimerFired(time.monotonic(), name))

    def _tell_change(self, worker: int, state: str, why: str) -> None:
        kinds = {"ready": "worker_ready", "dead": "worker_dead", "quarantined": "quarantine", "drained": "drain"}
        self.events.add(kinds.get(state, f"worker_{state}"), worker=worker, why=why)
        if state in kinds:
            log.info("worker %d %s%s", worker, state, f" ({why})" if why else "")

    # -- frames --------------------------------------------------------------------------------------------------

    def on_frame(self, link: WorkerLink, message: frames.FromWorker) -> None:
        """A whole message of a worker."""
        slot = self.slots[link.worker]
        if slot.link is not link:
            return
        match message:
            case frames.Step():
                self._commit(slot, link, message)
            case frames.Ready():
                self._worker_ready(slot, link, message)
            case frames.Failed(reason=reason):
                link.failure = reason
                log.error("worker %d: %s", link.worker, reason)

    def _worker_ready(self, slot: Slot, link: WorkerLink, message: frames.Ready) -> None:
        link.ready = True
        self.tell(e.WorkerReady(time.monotonic(), slot.worker, link.incarnation, message.num_pages, message.pool_kept))
        self.recoveries.reborn(slot.worker)

    def _commit(self, slot: Slot, link: WorkerLink, step: frames.Step) -> None:
        """One step happened: mirror, ledger, streams, core, in this order."""
        now = time.monotonic()
        slot.last_frame = step
        slot.mirror.apply(step)
        for rid, epoch, cached in step.admitted:
            self._admitted(now, slot.worker, rid, epoch, cached)
        if step.restored:  # before the first token after it, which closes what is told of its recovery
            self._enter_restores(slot, step)
        endings = {rid: reason for rid, _, reason in step.finished}
        for rid, epoch, drawn in step.tokens:
            self._drawn(now, slot, rid, epoch, drawn, endings.get(rid))
        if step.sealed:
            self._enter_seals(slot, step)
        for rid, epoch in step.dropped:
            if (entry := self.ledger.entries.get(rid)) is not None:
                self.recoveries.moved(rid, len(entry.tokens))
                self.tell(e.MovedOut(now, slot.worker, rid, epoch, len(entry.tokens)))
        if step.seconds:
            shape = (step.decodes, step.prefill_tokens, step.context_tokens)
            counted = (*shape, step.seconds, step.free_pages, self._crossings(slot, step))
            self.tell(e.StepCommitted(now, slot.worker, link.incarnation, step.step, *counted))
            slot.step_s = step.seconds
            slot.drawn.add(len(step.tokens), now)
        self._tell_quiet(now, slot, step)

    def _enter_seals(self, slot: Slot, step: frames.Step) -> None:
        """Pages that were sealed: they exist from now on."""
        now = time.monotonic()
        page_bytes = self.core.state.config.checkpoints.page_bytes
        marks: dict[tuple[int, int], int] = {}
        for rid, epoch, index, crc in step.sealed:
            entry = self.ledger.entries.get(rid)
            if entry is not None and entry.epoch == epoch and index < len(entry.slots):
                self.arena.enter(entry.slots[index], crc, slot.pool_identity)
                marks[rid, epoch] = index + 1
                for holder in self._holders(rid):
                    holder.sealed.add(page_bytes, now)
        if marks:
            sealed = tuple((rid, epoch, mark) for (rid, epoch), mark in marks.items())
            self.tell(e.PagesSealed(now, slot.worker, sealed))

    def _enter_restores(self, slot: Slot, step: frames.Step) -> None:
        """Requests whose pages were loaded. The first holder's replica is read as long as it is good."""
        now = time.monotonic()
        for rid, epoch, pages, count, seconds in step.restored:
            self.recoveries.restored(rid, pages * self.config.page_size, count, seconds)
            for holder in self._holders(rid)[:1]:
                holder.restored_bytes += count
                holder.restoring_s += seconds
            self.tell(e.RestoreDone(now, slot.worker, rid, epoch, pages, count, seconds))

    def _holders(self, rid: int) -> list[Slot]:
        """On whose budgets a request's KV checkpoint is."""
        checkpoint = self.core.state.arena.checkpoints.get(rid)
        return [self.slots[holder] for holder in checkpoint.holders] if checkpoint is not None else []

    def _crossings(self, slot: Slot, step: frames.Step) -> tuple[tuple[int, int], ...]:
        """Requests that completed a page in this step: they need room in the arena for the next."""
        if not self.arena.num_slots:
            return ()
        moved = [rid for rid, *_ in step.tokens] + [rid for rid, _ in step.progress]
        return tuple(slot.mirror.crossings(moved, self.config.page_size))

    def _tell_quiet(self, now: float, slot: Slot, step: frames.Step) -> None:
        """An end on a worker is its acknowledgement too: it writes to those slots no more."""
        if self.arena.num_slots:
            ended = [(rid, epoch) for rid, epoch, _ in step.finished]
            for rid, epoch in (*ended, *step.dropped, *step.quiet):
                self.tell(e.SlotsQuiet(now, slot.worker, rid, epoch))

    def _admitted(self, now: float, worker: int, rid: int, epoch: int, cached: int) -> None:
        entry = self.ledger.entries.get(rid)
        if entry is not None and entry.cached is None:
            self.figures.queue_s.observe(now - entry.arrived)
            entry.cached = min(cached, entry.num_prompt)
        self.tell(e.Admitted(now, worker, rid, epoch, cached))

    def _drawn(self, now: float, slot: Slot, rid: int, epoch: int, drawn: list[Any], reason: str | None) -> None:
        stream = self._streams.get(rid)
        gain = self.ledger.extend(rid, epoch, drawn, reason)
        if gain is None or stream is None:
            return
        entry = self.ledger.entries[rid]
        slot.mirror.sampled(rid, len(entry.tokens))
        if entry.is_recovering:
            entry.is_recovering = self.recoveries.first_token(rid, slot.worker, stream.last_news)
        stream.gained(entry, gain)
        if gain.finish_reason is not None:
            self.counters["finished"] += 1
            self._forget(rid)
            ended = e.ClientGone(now, rid) if gain.stopped else e.RequestFinished(now, rid, entry.num_generated)
            self.tell(ended)

    # -- failure -------------------------------------------------------------------------------------------------

    def on_exit(self, link: WorkerLink, evidence: str) -> None:
        """The kernel, or garbage in its socket, says that a worker is at its end."""
        if self.slots[link.worker].link is link:
            self.tell(e.WorkerExiting(time.monotonic(), link.worker, link.incarnation, evidence))

    async def _fence(self, command: c.Fence) -> None:
        """Fence, settle, plan: DESIGN §5.2-4."""
        slot = self.slots[command.worker]
        noticed = failed = time.monotonic()
        if slot.birth is not None:
            slot.birth.cancel()
            await asyncio.wait([slot.birth])
        link = slot.link
        if link is None:  # it was never born
            self._settle(slot, command, command.cause, own_making=command.cause not in PLANNED_CAUSES)
            return
        if command.cause in PLANNED_CAUSES:
            pass  # nothing failed before we decided so
        elif link.disturbed_at is not None:
            failed = link.disturbed_at
        elif (status := link.status()) is not None and status.since_ns:
            failed = min(noticed, max(status.since_ns / 1e9, link.born))  # its last sign of life
        status = link.status()
        innocent = link.is_stopped() or (status is not None and status.phase != Phase.COMPUTE)
        found = link.exit_status()
        await link.fenced()
        link.read_out()
        fenced = time.monotonic()
        cause, own_making = await self._judge(link, command.cause, innocent, found)
        if link.is_garbled:
            cause, own_making = "exit", True
        if slot.device_lost:
            cause, own_making = "device_lost", False
        slot.link = None
        covered = documents.checkpoints(self)
        plan = self._settle(slot, command, cause, own_making)
        self._tell_recovery(plan, covered, (noticed, failed, fenced))
        link.close()

    async def _judge(self, link: WorkerLink, cause: str, innocent: bool, found: int | None) -> tuple[str, bool]:
        """The cause for the report, and whether the death speaks against the worker or its requests.

        A hang is `innocent` if a stop signal holds the worker, or if it came to a stand between two steps.
        `found` is the exit status of a worker that was dying already when it was to be fenced for another cause.
        """
        if found is not None and (found >= 0 or -found in CRASH_SIGNALS) and not link.disturbed:
            return ("signal" if found < 0 else "exit"), True
        if cause in PLANNED_CAUSES or cause == "slow":
            return cause, False
        if cause == "hang":
            return cause, not (innocent or link.disturbed)
        status = link.exit_status()
        if status is None:
            done, _ = await asyncio.wait([link.child.status], timeout=1.0)
            status = link.child.status.result() if done else None
        if status is None or link.disturbed:
            return "signal", False
        if status < 0:
            return "signal", -status in CRASH_SIGNALS or self._memory_ran_out()
        return "exit", True

    def _memory_ran_out(self) -> bool:
        """Whether the cgroup's out-of-memory killer has struck, and no other death accounts for it."""
        if sizing.oom_kills() <= self._oom_kills:
            return False
        self._oom_kills += 1
        return True

    def _settle(self, slot: Slot, command: c.Fence, cause: str, own_making: bool) -> c.Planned:
        assert self.report is not None
        pool_lost = slot.device_lost or slot.pool_identity != self.report.identity
        slot.returning.clear()
        owned = [self.ledger.entries.get(rid) for rid in self.core.state.workers[slot.worker].requests]
        lost = [entry for entry in owned if entry is not None]
        interrupted = tuple(
            e.Interrupted(entry.rid, len(entry.tokens), slot.mirror.computed.get(entry.rid, 0)) for entry in lost
        )
        for entry in lost:
            entry.is_rebalanced = False  # this is a recovery, whatever move was under way
        died = (command.worker, command.incarnation, cause, own_making, pool_lost)
        event = e.Settled(time.monotonic(), *died, interrupted)
        answer = self.tell(event)
        return next(command for command in answer if isinstance(command, c.Planned))

    def _tell_recovery(
        self, plan: c.Planned, covered: dict[str, Any], times: tuple[float, float, float] | None = None
    ) -> None:
        """Open the report, or go on with it; `times` (noticed, failed, fenced) if the worker is no more."""
        begun = self.recoveries.begun(plan) if times is not None else None
        report = begun or self.recoveries.open(plan, covered)
        if times is not None:
            report.fenced(*times)
        report.planned(plan)
        slot = self.slots[plan.worker]
        for rid, way, heir in plan.ways:
            entry = self.ledger.entries.get(rid)
            if entry is not None:
                kept = self._kept_tokens(slot, entry, way)
                entry.is_recovering = True
                entry.is_rebalanced = plan.cause == "rebalance"
                holders = [holder.worker for holder in self._holders(rid)]
                self.recoveries.stays(rid)  # an older move of it is superseded
                report.interrupted(rid, f"req-{rid}", way, heir, len(entry.tokens), kept, holders)
        if begun is None:
            kind = "rebalance" if plan.cause == "rebalance" else "recovery"
            told = {"report": report.document["id"], "requests": len(plan.ways), "ways": report.ways}
            self.events.add(kind, worker=plan.worker, cause=plan.cause, **told, checkpoint=covered)
        what = "lost " if times is not None else ""
        log.info("worker %d %s(%s): %d requests go on", plan.worker, what, plan.cause, len(plan.ways))

    def _kept_tokens(self, slot: Slot, entry: Entry, way: str) -> int:
        """Tokens whose KV an interrupted request need not compute again."""
        if way == "reattach":
            return slot.mirror.computed.get(entry.rid, 0)
        return entry.loading * self.config.page_size if way == "restore" else 0

    # -- births --------------------------------------------------------------------------------------------------

    def _spawn(self, slot: Slot, incarnation: int, keep_pool: bool) -> None:
        if keep_pool:
            slot.mirror.keep_only(set(slot.returning))
        else:
            slot.mirror.clear()
        slot.birth = self._tasks.create_task(self._give_birth(slot, incarnation, keep_pool))
        slot.birth.add_done_callback(lambda _: setattr(slot, "birth", None))

    async def _give_birth(self, slot: Slot, incarnation: int, keep_pool: bool) -> None:
        """Start an incarnation; what goes wrong before it is ready is told like any other death."""
        while not self.ended.done():
            server = self._fork_server
            try:
                await births.give_birth(self, slot, incarnation, keep_pool, server)
                return
            except ForkServerGone as error:
                if server is not self._fork_server:
                    continue  # _server_died has put another in its place
                reason = str(error)
            except (OSError, LumenboxError) as error:
                reason = str(error)
            log.error("worker %d was not born: %s", slot.worker, reason)
            self.tell(e.SpawnFailed(time.monotonic(), slot.worker, incarnation, reason))
            return

    def _adopt_server(self, server: ForkServer) -> None:
        self._fork_server = server
        server.on_death = self._server_died
        if not hasattr(server, "warm"):
            server.attach()

    def _server_died(self, server: ForkServer) -> None:
        """Its children are killed by the kernel and recovered one by one; they need a new one to be forked from."""
        if server is not self._fork_server or self.ended.done():
            return
        self.events.add("fork_server_dead")
        self._cold_deaths = 0 if server.was_warm else self._cold_deaths + 1
        if self._cold_deaths < (EARLY_DEATHS if self.core.state.has_served else 1):
            log.warning("the fork server died; starting another")
            self._adopt_server(self._new_fork_server(self._environment))
        else:
            self._perform(c.Exit(1, "the fork server cannot start; its log is fork-server.log in the run directory"))

    # -- verbs ---------------------------------------------------------------------------------------------------

    def ask(self, verb: str, worker: int = -1) -> None:
        """An operator's wish."""
        self.tell(e.OperatorAsked(time.monotonic(), verb, worker))

    async def renew(self, worker: int, verb: str) -> None:
        """Replace a worker's process; its requests go on in the next one, or elsewhere."""
        slot = self.core.state.workers[worker]
        is_gone = slot.phase in (WorkerPhase.DEAD, WorkerPhase.QUARANTINED)
        wanted = slot.incarnation if is_gone else slot.incarnation + 1
        self.ask(verb, worker)
        await self.until(lambda: slot.incarnation >= wanted and self.is_settled(worker))
        if slot.phase not in (WorkerPhase.READY, WorkerPhase.DRAINED):
            raise LumenboxError(f"worker {worker} did not come back: it is {slot.phase}")

    def is_settled(self, worker: int) -> bool:
        """Whether its slot stays in its state if nothing happens."""
        phase = self.core.state.workers[worker].phase
        if phase == WorkerPhase.DEAD:
            return not self.config.respawn
        return phase in (WorkerPhase.READY, WorkerPhase.DRAINED, WorkerPhase.QUARANTINED)

    async def upgrade(self, environment: dict[str, str]) -> None:
        """A second fork server, with the code on disk and `environment`; slots move one by one, the first retires."""
        new = self._new_fork_server(environment)
        new.attach()
        try:
            report, weight_fd = await births.load_weights(new, self.config)
        except BaseException:
            new.close()
            raise
        self._old_servers.append(self._fork_server)
        retired = list(self._old_servers)
        self._environment = environment
        self._fork_server, new.on_death = new, self._server_died
        if not new.alive:
            self._server_died(new)
        self._adopt_weights(report, weight_fd)
        for worker in sorted(self.core.state.workers):
            await self.renew(worker, "upgrade")
        for server in retired:  # every worker has been born of a later one since
            server.close()
        self._old_servers = [server for server in self._old_servers if server not in retired]

    def _adopt_weights(self, report: LoadReport, weight_fd: int) -> None:
        """Keep the segment that is there if the new code would compute the same from it; else change over."""
        if self.report is not None and report.identity == self.report.identity:
            os.close(weight_fd)
            return
        if self.weight_fd >= 0:
            os.close(self.weight_fd)
        self.report, self.weight_fd = report, weight_fd

    @property
    def is_over(self) -> bool:
        """Whether it is about to end."""
        return self.ended.done() or self.core.state.closing

    @property
    def num_ready(self) -> int:
        """Workers that serve."""
        return sum(1 for worker in self.core.state.workers.values() if worker.phase == WorkerPhase.READY)

    async def drained(self) -> None:
        """Until no request is left."""
        await self.until(lambda: not self.core.state.requests)

    def give_up(self) -> None:
        """The box ends: nothing is taken or recovered any more, and every open stream ends with an error event."""
        self.ask("shutdown")
        self._has_given_up = True
        for rid in list(self.ledger.entries):
            self._end_stream(rid, "worker_lost")
            self.tell(e.ClientGone(time.monotonic(), rid))

    def beat(self) -> None:
        """Once a second: keep silent streams alive, and forget whom else memory cost their lives."""
        if not any(worker.phase == WorkerPhase.SUSPECT for worker in self.core.state.workers.values()):
            self._oom_kills = max(self._oom_kills, self._oom_kills_before)
            self._oom_kills_before = sizing.oom_kills()
        now = time.monotonic()
        for stream in set(self._streams.values()):
            stream.beat(now)
