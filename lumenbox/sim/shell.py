"""The simulated coordinator: does with the real core, ledger and mirrors what `lumenbox.coordinator.box` does.

Everything that reaches it goes through `soon`: it has a latency, and waits while the coordinator is paused.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

import msgspec

from lumenbox.core import commands as c
from lumenbox.core import events as e
from lumenbox.core.batching import Report
from lumenbox.core.commands import AnyCommand
from lumenbox.core.events import AnyEvent
from lumenbox.core.health import deadline_s
from lumenbox.core.ledger import Entry, Ledger
from lumenbox.core.machine import PLANNED_CAUSES, Core
from lumenbox.core.mirror import PoolMirror
from lumenbox.core.requests import Sampled
from lumenbox.core.state import SERVING, CoreState, WorkerPhase
from lumenbox.sim.arena import Arena, Records, Writer
from lumenbox.sim.clock import Action, Clock
from lumenbox.sim.kv import VOCABULARY, KvPool
from lumenbox.sim.messages import (
    Assign,
    Boot,
    Cancel,
    FromWorker,
    Placed,
    Preload,
    Ready,
    Release,
    Reserve,
    SealRate,
    Step,
    ToWorker,
)
from lumenbox.sim.oracle import Client, Oracle, failure_free
from lumenbox.sim.scenario import Call, Scenario
from lumenbox.sim.worker import Phase, SimWorker

IDLE_DEADLINE_S = 1.0
BIRTH_DEADLINE_S = 60.0
LOOK_S = 0.05
HISTORY = 60


@dataclass(slots=True, eq=False)
class Link:
    """One incarnation as the coordinator holds it."""

    worker: int
    incarnation: int
    process: SimWorker
    born: float
    last_assign: float
    last_heard: float
    ready: bool = False
    disturbed: bool = False
    fenced: bool = False


@dataclass(slots=True, frozen=True, eq=False)
class Birth:
    """An incarnation that is being forked."""

    incarnation: int
    keep_pool: bool


@dataclass(slots=True)
class ForkServer:
    """`warm_at` is when it can fork."""

    warm_at: float
    alive: bool = True


@dataclass(slots=True)
class Slot:
    """What outlives the incarnations, and the one that lives. `dooms` are the planned deaths of the next ones.

    `returning` are those that the next one re-attaches to, with their sealed pages. `identity` is what its pages are
    computed with, `next_identity` that of the next incarnation.
    """

    worker: int
    kv: KvPool
    mirror: PoolMirror = field(default_factory=PoolMirror)
    link: Link | None = None
    birth: Birth | None = None
    returning: dict[int, int] = field(default_factory=dict)
    phase: str = "starting"
    """As the core has told it."""
    dooms: deque[str] = field(default_factory=deque)
    device_lost: bool = False
    identity: int = 0
    next_identity: int = 0


class Shell:
    """See module docstring."""

    def __init__(self, scenario: Scenario, clock: Clock, noise: random.Random) -> None:
        self.scenario = scenario
        self.clock = clock
        self.noise = noise
        self.core = Core(scenario.core)
        self.oracle = Oracle()
        self.ledger = Ledger(VOCABULARY)
        size = scenario.core.page_size
        self.slots = [Slot(i, KvPool(scenario.num_pages, size)) for i in range(scenario.core.workers)]
        self.arena = Arena(size, noise, self._may_write)
        self._records = Records()
        self.server = ForkServer(0.05)
        self.exited: c.Exit | None = None
        self.history: deque[tuple[float, object]] = deque(maxlen=HISTORY)
        self.events_told = 0
        self._groups: dict[int, list[Client]] = {}
        self._epochs: dict[int, int] = {}
        self._cancelled_at: dict[int, float] = {}
        self._timers: dict[str, float] = {}
        self._paused_until = 0.0
        self._twin: Core | None = None
        self._twin_from = noise.randrange(300) if noise.random() < 0.5 else -1
        for slot in self.slots:
            self._give_birth(slot, Birth(1, keep_pool=False))

    # -- the coordinator's own time ------------------------------------------------------------------------------

    def soon(self, delay_s: float, action: Action) -> None:
        """Do it after a while, on the coordinator's loop."""
        self.clock.after(delay_s, partial(self._when_awake, action))

    def _when_awake(self, action: Action) -> None:
        if self.clock.now < self._paused_until:
            self.clock.at(self._paused_until, partial(self._when_awake, action))
        else:
            action()

    def pause(self, seconds: float) -> None:
        """The coordinator stands still; when it wakes it reads every socket before anything else."""
        self._paused_until = max(self._paused_until, self.clock.now + seconds)
        self.clock.at(self._paused_until, self._drain_all)

    def _drain_all(self) -> None:
        for slot in self.slots:
            if slot.link is not None:
                self._read(slot.link)

    # -- core ----------------------------------------------------------------------------------------------------

    def tell(self, event: AnyEvent) -> list[AnyCommand]:
        """Hand an event to the core and perform its answer; a twin that began from a snapshot must answer the same."""
        if self.events_told == self._twin_from:
            snapshot = msgspec.msgpack.encode(self.core.state)
            self._twin = Core(state=msgspec.msgpack.decode(snapshot, type=CoreState))
        self.events_told += 1
        self.history.append((self.clock.now, event))
        commands = self.core.handle(event)
        if self._twin is not None:
            assert self._twin.handle(event) == commands, "a replay from a snapshot answers otherwise"
        self.core.check()
        for rid, checkpoint in self.core.state.arena.checkpoints.items():
            assert checkpoint.sealed <= self._records.whole.get(rid, 0), f"request {rid}: pages count as sealed, unseen"
        for command in commands:
            self.history.append((self.clock.now, command))
            self._perform(command)
        return commands

    def check_twin(self) -> None:
        """The replayed core ends where the other does."""
        assert self._twin is None or self._twin.state == self.core.state, "a replay ends in another state"

    def _perform(self, command: AnyCommand) -> None:  # noqa: PLR0912 (one case a command)
        match command:
            case c.Assign():
                self._assign(command)
            case c.Cancel(worker=worker, req=req, epoch=epoch) | c.MoveOut(worker=worker, req=req, epoch=epoch):
                self._send(self.slots[worker], Cancel(req, epoch))
            case c.ReserveSlots():
                self._reserve(command)
            case c.DropSlots(worker=worker, req=req, epoch=epoch):
                self._send(self.slots[worker], Release(req, epoch))
            case c.PreRestore():
                self._preload(command)
            case c.SetSealRate(worker=worker, bytes_s=bytes_s):
                self._send(self.slots[worker], SealRate(bytes_s))
            case c.Refuse(reqs=reqs):
                for req in reqs:
                    self.ledger.close(req)
                    self.oracle.clients[req].ended("refused")
            case c.EndStream():
                self._end_stream(command)
            case c.Fence():
                self._fence(command)
            case c.Spawn(worker=worker, incarnation=incarnation, keep_pool=keep_pool):
                self._spawn(self.slots[worker], Birth(incarnation, keep_pool))
            case c.SetTimer(name=name, at=at):
                self._timers[name] = at
                self.soon(at - self.clock.now, partial(self._timer_due, name, at))
            case c.Changed(worker=worker, state=state):
                self.slots[worker].phase = state
            case c.Planned() | c.Stays():
                pass
            case c.Exit():
                self.exited = command
            case _:
                assert_never(command)

    def _timer_due(self, name: str, at: float) -> None:
        if self._timers.get(name) == at:
            del self._timers[name]
            self.tell(e.TimerFired(self.clock.now, name))

    def _send(self, slot: Slot, message: ToWorker) -> None:
        if slot.link is not None:
            if isinstance(message, Assign):
                slot.link.last_assign = self.clock.now
            slot.link.process.receive(message)

    def _assign(self, command: c.Assign) -> None:
        slot, entry = self.slots[command.worker], self.ledger.entries[command.req]
        assert command.epoch > self._epochs.get(command.req, -1), "two assignments under one epoch"
        self._epochs[command.req] = entry.epoch = command.epoch
        straggler = self.ledger.extend(command.req, command.epoch - 1, [Sampled(1)], None)
        assert straggler is None, "a late token of the former epoch is taken"
        entry.slots = list(command.slots)
        if command.way == "reattach":
            slot.returning[entry.rid] = command.sealed
            return
        saves = command.way != "recompute" or self.core.state.config.routing == "cost"
        assert saves or not command.sealed, f"request {entry.rid} is computed again, although pages of it are sealed"
        assert slot.phase in SERVING, "assigned to one that does not serve"
        assert slot.link is not None and not slot.link.fenced, "assigned to the dead"
        crcs = self._records.checksums(entry.slots[: command.sealed], slot.identity)
        self._send(slot, Assign(self._placed(entry, crcs, load=command.way == "restore")))
        if command.way == "restore" and not crcs:  # no record of this identity: the worker has nothing to load
            nothing = (0, 0, 0.0)
            self.soon(0.0, partial(self._restored, slot, command.req, command.epoch, *nothing))

    def _reserve(self, command: c.ReserveSlots) -> None:
        assert self.slots[command.worker].link is not None, "slots are reserved for the dead"
        if command.first == 0:
            self._records.whole[command.req] = 0
        if (entry := self.ledger.entries.get(command.req)) is not None:
            del entry.slots[command.first :]
            entry.slots += command.slots
        self._send(self.slots[command.worker], Reserve(command.req, command.epoch, command.first, list(command.slots)))

    def _preload(self, command: c.PreRestore) -> None:
        entry, slot = self.ledger.entries[command.req], self.slots[command.worker]
        crcs = self._records.checksums(command.slots, slot.identity)
        self._send(slot, Preload(self._placed(entry, crcs, load=True)))

    def _may_write(self, writer: Writer, index: int, slot: int) -> None:
        """The core must have reserved the slot for this page of this writer, or still wait for its last word on it."""
        worker, rid, epoch = writer
        state = self.core.state
        request, checkpoint = state.requests.get(rid), state.arena.checkpoints.get(rid)
        if request is not None and checkpoint is not None and (request.worker, request.epoch) == (worker, epoch):
            own = checkpoint.slots[index : index + 1]
            if own and slot in own[0]:
                return
        gone = state.arena.unquiet.get((worker, rid, epoch))
        waited_for = gone is not None and any(slot in page for page in gone.slots)
        assert waited_for, f"worker {worker} writes page {index} of request {rid} to slot {slot}, which is not its own"

    def _placed(
        self,
        entry: Entry,
        crcs: list[int],
        load: bool = False,
        table: tuple[int, ...] = (),
        num_computed: int = 0,
    ) -> Placed:
        return Placed(
            entry.rid,
            entry.epoch,
            entry.params,
            list(entry.tokens),
            entry.num_prompt,
            entry.priority,
            self.oracle.clients[entry.rid].call.poison,
            list(table),
            num_computed,
            list(entry.slots),
            len(crcs),
            crcs if load else [],
        )

    # -- clients -------------------------------------------------------------------------------------------------

    def call(self, call: Call) -> None:
        """A client calls."""
        if self.exited is not None:
            return
        max_model_len = self.scenario.core.max_model_len
        group: list[Client] = []
        for prompt in call.prompts:
            for choice in range(call.n):
                rid = len(self.oracle.clients) + 1
                client = Client(rid, call, failure_free(call, prompt, choice, max_model_len))
                params = msgspec.structs.replace(call.params, choice=choice)
                self.ledger.open(rid, params, prompt, call.stop, call.include_stop, call.priority)
                self.oracle.clients[rid] = client
                self._groups[rid] = group
                group.append(client)
        entries = [self.ledger.entries[client.rid] for client in group]
        news = tuple(e.NewRequest(x.rid, x.num_prompt, x.params.max_tokens) for x in entries)
        self.tell(e.RequestArrived(self.clock.now, news, call.priority))
        if call.leaves_at != float("inf"):
            self.soon(call.leaves_at - self.clock.now, partial(self.abandon, group))

    def groups(self) -> list[list[Client]]:
        """Every call so far, as its choices."""
        return [group for rid, group in self._groups.items() if group[0].rid == rid]

    def abandon(self, group: list[Client]) -> None:
        """The client of these choices leaves."""
        for client in group:
            if not client.end:
                client.ended("left")
                self.ledger.close(client.rid)
                self._client_gone(client.rid)

    def _client_gone(self, rid: int) -> None:
        self._cancelled_at[rid] = self.clock.now
        self.tell(e.ClientGone(self.clock.now, rid))

    def _end_stream(self, command: c.EndStream) -> None:
        self.oracle.failed(command, self.core.state)
        self.ledger.close(command.req)
        # not at once: the commands that follow in the same answer may name its siblings
        self.soon(0.0, partial(self.abandon, self._groups[command.req]))

    # -- frames --------------------------------------------------------------------------------------------------

    def _readable(self, link: Link) -> None:
        if self.slots[link.worker].link is link and not link.fenced:
            self._read(link)

    def _read(self, link: Link) -> None:
        """Every whole frame that is in the socket."""
        frames, slot = link.process.socket.frames, self.slots[link.worker]
        link.last_heard = self.clock.now
        while frames:
            self._on_frame(slot, link, frames.popleft())
        if link.process.alive:
            self._check_mirror(slot, link.process.promised)

    def _on_frame(self, slot: Slot, link: Link, frame: FromWorker) -> None:
        match frame:
            case Ready(num_pages=pages, pool_kept=kept):
                link.ready = True
                self.tell(e.WorkerReady(self.clock.now, slot.worker, link.incarnation, pages, kept))
            case Step():
                self._commit(slot, link, frame)

    def _commit(self, slot: Slot, link: Link, step: Step) -> None:
        """One step happened: mirror, ledger, streams, core, in this order."""
        now, report = self.clock.now, step.report
        slot.mirror.apply(report)
        for rid, epoch, cached in report.admitted:
            self.tell(e.Admitted(now, slot.worker, rid, epoch, cached))
        for rid, epoch, pages, count, seconds in step.news.restored:
            self._restored(slot, rid, epoch, pages, count, seconds)
        endings = {rid: reason for rid, _, reason in report.finished}
        for rid, epoch, drawn in report.tokens:
            self._drawn(slot, step, rid, epoch, drawn, endings.get(rid))
        if self.core.checkpoints.are_on:
            self._enter_seals(slot, step)
        for rid, epoch in report.dropped:
            if (entry := self.ledger.entries.get(rid)) is not None:
                self.tell(e.MovedOut(now, slot.worker, rid, epoch, len(entry.tokens)))
        if step.seconds:
            s = step.shape
            shape = (s.decodes, s.prefill_tokens, s.context_tokens)
            counted = (*shape, step.seconds, step.free_pages, self._crossings(slot, report))
            self.tell(e.StepCommitted(now, slot.worker, link.incarnation, step.number, *counted))
        if self.core.checkpoints.are_on:
            ended = [(rid, epoch) for rid, epoch, _ in report.finished]
            for rid, epoch in (*ended, *report.dropped, *step.news.quiet):
                self.tell(e.SlotsQuiet(now, slot.worker, rid, epoch))

    def _enter_seals(self, slot: Slot, step: Step) -> None:
        """Pages that were sealed: they exist from now on."""
        now = self.clock.now
        marks: dict[tuple[int, int], int] = {}
        for rid, epoch, index, crc in step.news.sealed:
            entry = self.ledger.entries.get(rid)
            if entry is not None and entry.epoch == epoch and index < len(entry.slots):
                self._records.enter(rid, index, entry.slots[index], crc, slot.identity)
                marks[rid, epoch] = index + 1
        if marks:
            self.tell(e.PagesSealed(now, slot.worker, tuple((*key, mark) for key, mark in marks.items())))

    def _restored(self, slot: Slot, rid: int, epoch: int, pages: int, count: int, seconds: float) -> None:
        request = self.core.state.requests.get(rid)
        if request is not None and (request.worker, request.epoch) == (slot.worker, epoch):
            self._records.whole[rid] = min(self._records.whole.get(rid, 0), pages)
        self.tell(e.RestoreDone(self.clock.now, slot.worker, rid, epoch, pages, count, seconds))

    def _crossings(self, slot: Slot, report: Report) -> tuple[tuple[int, int], ...]:
        """Requests that completed a page in this step: they need room in the arena for the next."""
        if not self.core.checkpoints.are_on:
            return ()
        moved = [rid for rid, *_ in report.tokens] + [rid for rid, _ in report.progress]
        return tuple(slot.mirror.crossings(moved, self.scenario.core.page_size))

    def _drawn(self, slot: Slot, step: Step, rid: int, epoch: int, drawn: list[Sampled], reason: str | None) -> None:
        gain = self.ledger.extend(rid, epoch, drawn, reason)
        if gain is None:
            # a restore comes between reading the commands and the step
            in_time = step.started <= self._cancelled_at[rid] or step.news.restored
            assert in_time, f"request {rid} is computed on after it was cancelled"
            return
        assert self.core.state.requests[rid].worker == slot.worker, "tokens of one who does not own the request"
        entry = self.ledger.entries[rid]
        slot.mirror.sampled(rid, len(entry.tokens))
        self.oracle.clients[rid].gained(gain, entry.num_generated)
        if gain.finish_reason is not None:
            self.ledger.close(rid)
            if gain.stopped:
                self._client_gone(rid)
            else:
                self.tell(e.RequestFinished(self.clock.now, rid, entry.num_generated))

    def _check_mirror(self, slot: Slot, promised: PoolMirror) -> None:
        """All frames are delivered: the mirror shows what was promised."""
        assert slot.mirror.tables == promised.tables, "the mirror has other tables than the worker"
        assert slot.mirror.hashes == promised.hashes, "the mirror has another prefix cache than the worker"
        for rid in promised.computed.keys() & self.ledger.entries.keys():
            assert slot.mirror.computed[rid] == promised.computed[rid], "the mirror counts other KV than there is"

    # -- health --------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """As `monitor._look`: judge every heartbeat."""
        for slot in self.slots:
            if (link := slot.link) is not None and not link.fenced:
                late = self._late_s(link)
                if late > 0:
                    step = link.process.steps
                    self.tell(e.StepOverdue(self.clock.now, link.worker, link.incarnation, step, late))

    def _late_s(self, link: Link) -> float:
        now, process, worker = self.clock.now, link.process, self.core.state.workers[link.worker]
        if not link.ready:
            return now - link.born - BIRTH_DEADLINE_S
        if process.phase == Phase.COMPUTE:
            return now - process.since - deadline_s(self.core.state.model, worker.pace, process.shape)
        if worker.requests:  # between steps
            return now - max(process.since, link.last_assign, link.last_heard) - IDLE_DEADLINE_S
        return 0.0

    # -- failure -------------------------------------------------------------------------------------------------

    def _died(self, link: Link) -> None:
        """The kernel shows it, sooner or later."""
        if link.process.killer is not None:
            self.oracle.died_by(link.process.killer)
        late = self.noise.random() ** 4 * self.scenario.late
        self.soon(0.0002 + late, partial(self._on_exit, link))

    def _on_exit(self, link: Link) -> None:
        if self.slots[link.worker].link is link:
            self.tell(e.WorkerExiting(self.clock.now, link.worker, link.incarnation, "pidfd"))

    def _fence(self, command: c.Fence) -> None:
        """Kill, read out, judge, settle: each takes its time, and other things happen in between."""
        slot = self.slots[command.worker]
        slot.birth = None
        if slot.link is None:
            own_making = command.cause not in PLANNED_CAUSES
            self.soon(0.0, partial(self._settle, slot, command, command.cause, own_making))
        else:
            self.soon(self.noise.uniform(0.0, 0.002), partial(self._fenced, slot, slot.link, command))

    def _fenced(self, slot: Slot, link: Link, command: c.Fence) -> None:
        stopped, died_as = link.process.frozen, link.process.how
        link.process.die("killed")
        self._read(link)
        link.fenced = True
        cause, own_making = _judge(command.cause, died_as, stopped or link.disturbed)
        self.soon(self.noise.uniform(0.0, 0.01), partial(self._settle_link, slot, command, cause, own_making))

    def _settle_link(self, slot: Slot, command: c.Fence, cause: str, own_making: bool) -> None:
        slot.link = None
        self._settle(slot, command, cause, own_making)

    def _settle(self, slot: Slot, command: c.Fence, cause: str, own_making: bool) -> None:
        now, owned = self.clock.now, list(self.core.state.workers[slot.worker].requests)
        interrupted = tuple(
            e.Interrupted(rid, len(entry.tokens), slot.mirror.computed.get(rid, 0))
            for rid in owned
            if (entry := self.ledger.entries.get(rid)) is not None
        )
        self.oracle.settled(owned, own_making and self.core.state.workers[slot.worker].is_born)
        slot.returning = {}
        lost, slot.device_lost = slot.device_lost, False
        if lost:
            slot.kv.scramble((), self.noise)
        self.tell(e.Settled(now, slot.worker, command.incarnation, cause, own_making, lost, interrupted))

    # -- births --------------------------------------------------------------------------------------------------

    def _spawn(self, slot: Slot, birth: Birth) -> None:
        if birth.keep_pool:
            slot.mirror.keep_only(set(slot.returning))
        else:
            slot.mirror.clear()
        self._give_birth(slot, birth)

    def _give_birth(self, slot: Slot, birth: Birth) -> None:
        slot.birth = birth
        wait_s = max(0.0, self.server.warm_at - self.clock.now) + self.noise.uniform(0.002, 0.03)
        self.soon(wait_s, partial(self._forked, slot, birth, self.server))

    def _forked(self, slot: Slot, birth: Birth, server: ForkServer) -> None:
        if slot.birth is not birth:
            return  # fenced before it was born
        if not server.alive:
            self._give_birth(slot, birth)
            return
        slot.birth = None
        doom = slot.dooms.popleft() if slot.dooms else ""
        if doom == "unspawnable":
            self.tell(e.SpawnFailed(self.clock.now, slot.worker, birth.incarnation, "no descriptors left"))
            return
        slot.identity = slot.next_identity
        boot = self._boot(slot, birth)
        process = SimWorker(
            slot.worker,
            self.scenario,
            self.clock,
            self.noise,
            slot.kv,
            self.arena,
            boot,
            doom,
            lambda: self.soon(self.noise.uniform(0.0001, 0.003), partial(self._readable, link)),
            lambda: self._died(link),
        )
        link = slot.link = Link(slot.worker, birth.incarnation, process, self.clock.now, self.clock.now, self.clock.now)

    def _boot(self, slot: Slot, birth: Birth) -> Boot:
        returning, slot.returning = slot.returning, {}
        mirror = slot.mirror
        entries = [self.ledger.entries[rid] for rid in returning if rid in self.ledger.entries]
        mirror.keep_only({entry.rid for entry in entries})
        adopted: list[Placed] = []
        for entry in entries:
            crcs = self._records.checksums(entry.slots[: returning[entry.rid]], slot.identity)
            table, computed = tuple(mirror.tables[entry.rid]), mirror.computed[entry.rid]
            adopted.append(self._placed(entry, crcs, table=table, num_computed=computed))
        return Boot(adopted, list(mirror.hashes.items()) if birth.keep_pool else [])

    def fork_server_dies(self) -> None:
        """All its children die with it; another one takes its place once that is noticed."""
        if not self.server.alive or self.server.warm_at > self.clock.now:
            return
        self.server.alive = False
        for slot in self.slots:
            if slot.link is not None:
                slot.link.process.die("killed")
        self.soon(self.noise.uniform(0.001, 0.05), self._replace_server)

    def _replace_server(self) -> None:
        self.server = ForkServer(self.clock.now + self.noise.uniform(0.1, 1.0))

    # -- the end -------------------------------------------------------------------------------------------------

    def is_whole(self) -> bool:
        """Every slot serves that can, and nothing is left to do."""
        fine = {WorkerPhase.READY, WorkerPhase.QUARANTINED}
        if not self.scenario.core.respawn:
            fine.add(WorkerPhase.DEAD)
        return (
            not self.core.state.requests
            and not self.core.state.arena.unquiet
            and all(worker.phase in fine for worker in self.core.state.workers.values())
            and all(_rests(slot.link.process) for slot in self.slots if slot.link is not None)
        )

    def check_rest(self) -> None:
        """Nothing is left behind: all pages free or cached, no table in a mirror, every client has its end."""
        assert not self.ledger.entries and not self.core.num_waiting
        arena = self.core.state.arena
        assert not arena.checkpoints and not arena.unquiet and len(arena.free) == arena.fresh, "slots leaked"
        assert not any(w.holds or w.held_pages or w.restoring for w in self.core.state.workers.values())
        assert all(client.end for client in self.oracle.clients.values()), "a client waits for ever"
        for slot in self.slots:
            if slot.link is not None:
                pool = slot.link.process.scheduler.pool
                assert pool.num_free + pool.num_cached == pool.num_pages, "pages leaked"
                assert not slot.mirror.tables, "the mirror keeps tables of requests that have ended"


def _rests(process: SimWorker) -> bool:
    return process.alive and not process.frozen and process.phase == Phase.IDLE and not process.socket.frames


def _judge(cause: str, died_as: str, excused: bool) -> tuple[str, bool]:
    """The cause for the report, and whether the death speaks against the worker or its requests (box._judge).

    What had ended itself before the fence is judged by that, whatever the fence was for.
    """
    if died_as in ("crash", "exit"):
        return ("exit" if died_as == "exit" else "signal"), True
    if cause in PLANNED_CAUSES or cause == "slow":
        return cause, False
    if cause == "hang":
        return cause, not excused
    return "signal", False
