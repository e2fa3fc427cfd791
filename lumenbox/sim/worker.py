"""One incarnation of a simulated worker: the loop of `lumenbox.worker.loop` around the real `BatchScheduler`."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from enum import StrEnum

from lumenbox.core.batching import Batch, BatchScheduler, Report, Restore, Sequence
from lumenbox.core.cost import Shape
from lumenbox.core.mirror import PoolMirror
from lumenbox.core.requests import Sampled
from lumenbox.sim.arena import Arena
from lumenbox.sim.checkpoints import KvCheckpoints
from lumenbox.sim.clock import Action, Clock
from lumenbox.sim.kv import KvPool, draw
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
    Socket,
    Step,
    ToWorker,
)
from lumenbox.sim.scenario import Scenario

BETWEEN_STEPS_S = 0.0002


class Phase(StrEnum):
    """What the status page shows."""

    STARTING = "starting"
    COMPUTE = "compute"
    SEND = "send"
    IDLE = "idle"


class SimWorker:
    """Lives on a slot's KV pool. `how` tells what ended it: killed, crash, exit; "" while it lives.

    `promised` is what the coordinator will believe if it dies now: its mirror after every frame that was wholly sent.
    """

    def __init__(
        self,
        worker: int,
        scenario: Scenario,
        clock: Clock,
        noise: random.Random,
        kv: KvPool,
        arena: Arena,
        boot: Boot,
        doom: str,
        on_frame: Callable[[], None],
        on_death: Callable[[], None],
    ) -> None:
        self.socket = Socket()
        self.how = ""
        self.frozen = False
        self.hangs = False
        self.slow_factor = 1.0
        self.doom = doom
        self.killer: int | None = None
        """The poison request that ended it."""
        self.phase, self.since, self.shape, self.steps = Phase.STARTING, clock.now, Shape(0, 0, 0), 0
        self.promised = PoolMirror()
        self.scheduler = BatchScheduler(
            scenario.num_pages,
            scenario.core.page_size,
            scenario.max_num_seqs,
            scenario.token_budget,
            scenario.core.max_model_len,
        )
        self._step_s, self._prefill_s = scenario.step_s, scenario.prefill_s
        self._clock, self._noise, self._kv = clock, noise, kv
        self._on_frame, self._on_death = on_frame, on_death
        self._poison: dict[int, str] = {}
        self._waiting_actions: list[Action] = []
        self._worker, self._arena = worker, arena
        self._checkpoints = KvCheckpoints(worker, scenario.copying, arena, kv, self._after, self._passes)
        self._boot = boot
        self.promised.hashes.update(boot.hashed)
        for placed in boot.adopted:
            self.promised.tables[placed.rid] = list(placed.page_table)
            self.promised.computed[placed.rid] = placed.num_computed
            self._poison[placed.rid] = placed.poison
        self._after(noise.uniform(0.5, 1.5) * scenario.birth_s, self._start)

    # -- living and dying ----------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return not self.how

    def die(self, how: str) -> None:
        """The end, at any moment; what no frame vouched for may be half written."""
        if self.alive:
            self.how = how
            self.socket.commands.clear()
            size = self._kv.page_size
            pages = [(page, size) for page in self.promised.hashes]
            for rid, table in self.promised.tables.items():
                computed = self.promised.computed[rid]
                pages += [(page, min(size, computed - index * size)) for index, page in enumerate(table)]
            self._kv.scramble(pages, self._noise)
            self._arena.abandon(self._worker)
            self._on_death()

    def thaw(self) -> None:
        """Go on after a stop signal."""
        self.frozen = False
        actions, self._waiting_actions = self._waiting_actions, []
        for action in actions:
            self._after(0.0, action)

    def receive(self, command: ToWorker) -> None:
        """A command lands in the socket; it is read between two steps."""
        if self.alive:
            self.socket.commands.append(command)
            if self.phase == Phase.IDLE:
                self.phase = Phase.SEND
                self._after(BETWEEN_STEPS_S, self._turn)

    def _after(self, delay_s: float, action: Action) -> None:
        self._clock.after(delay_s, lambda: self._run(action))

    def _run(self, action: Action) -> None:
        if self.frozen:
            self._waiting_actions.append(action)
        elif self.alive:
            action()

    def _passes(self, point: str) -> bool:
        """Pass a point alive."""
        if self.doom == point:
            self.die("killed")
        return self.alive

    # -- the loop ------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self.doom in ("exit", "crash"):
            self.die(self.doom)
            return
        boot = self._boot
        if (boot.adopted or boot.hashed) and not self._adopt(boot):
            return
        self._write(Ready(len(self._kv), bool(boot.adopted or boot.hashed)))
        if self._passes("ready_sent"):
            self._turn()

    def _adopt(self, boot: Boot) -> bool:
        if not self._passes("reattach_begun"):
            return False
        copies = self.scheduler.adopt([_sequence(placed) for placed in boot.adopted], boot.hashed)
        held = self._held()
        for source, target, tokens in copies:
            assert target not in held and target not in self.promised.hashes, "a re-attach copies onto a page in use"
            self._kv.copy(source, target, tokens)
        self.scheduler.check()
        return self._passes("reattach_done")

    def _turn(self) -> None:
        """Obey what waits, load the pages of one request, then one step."""
        while self.socket.commands:
            self._obey(self.socket.commands.popleft())
            if not self.alive:
                return
        begun = self._checkpoints.begin_restore(self.scheduler)
        if begun is None:
            self._advance()
        elif self._passes("restore_begun"):
            seq, restore = begun
            seconds = self._checkpoints.load_s(restore)
            self._after(seconds, lambda: self._load(seq, restore, seconds))

    def _load(self, seq: Sequence, restore: Restore | None, seconds: float) -> None:
        held = self._held()
        for page in restore.pages if restore is not None else ():
            assert page not in held and page not in self.promised.hashes, "a restore loads onto a page in use"
            assert not self._checkpoints.is_copied(page), "a restore loads onto a page that is copied"
        self._checkpoints.load(self.scheduler, seq, restore, seconds)
        if self.alive:
            self._advance()

    def _advance(self) -> None:
        if self.scheduler.has_dropped:
            if self._commit(Shape(0, 0, 0), 0.0):
                self._after(BETWEEN_STEPS_S, self._turn)
            return
        batch = self.scheduler.plan(self._noise.choice((None, self._kv.page_size, 2 * self._kv.page_size)))
        self.scheduler.check()
        if batch is not None:
            self._begin(batch)
        elif self.scheduler.has_news or self._checkpoints.has_news:
            if self._commit(Shape(0, 0, 0), 0.0):
                self._after(BETWEEN_STEPS_S, self._turn)
        elif not self.scheduler.idle:
            assert self._checkpoints.moves, "a worker has work and can do none of it"
            self._after(10 * BETWEEN_STEPS_S, self._turn)
        else:
            self.phase, self.since = Phase.IDLE, self._clock.now

    def _obey(self, command: ToWorker) -> None:
        match command:
            case Assign(placed=placed) if placed.poison == "assign":
                self._crash_by(placed.rid)
            case Assign(placed=placed):
                self._poison[placed.rid] = placed.poison
                self.scheduler.add(_sequence(placed))
            case Cancel(rid=rid, epoch=epoch):
                if self.scheduler.drop(rid, epoch):
                    self._checkpoints.forget(self.scheduler, rid)
            case Preload(placed=placed):
                self._checkpoints.obey(self.scheduler, command, _sequence(placed))
            case Reserve() | Release() | SealRate():
                self._checkpoints.obey(self.scheduler, command, None)

    def _crash_by(self, rid: int) -> None:
        self.killer = rid
        self.die("crash")

    def _begin(self, batch: Batch) -> None:
        if not self._passes("page_taken"):
            return
        self.steps += 1
        self.phase, self.since = Phase.COMPUTE, self._clock.now
        self.shape = shape = Shape(batch.decodes, batch.prefill_tokens, batch.context_tokens)
        work_s = self._step_s * (0.8 + 0.1 * shape.decodes + 0.4 * self._noise.random())
        seconds = (work_s + self._prefill_s * shape.prefill_tokens) * self.slow_factor
        self._after(seconds, lambda: self._computed(batch, seconds))

    def _computed(self, batch: Batch, seconds: float) -> None:
        if self.hangs:
            return
        for chunk in batch.chunks:
            if self._poison.get(chunk.seq.rid) == "step":
                self._crash_by(chunk.seq.rid)
                return
        self._guard(batch)
        for chunk in batch.chunks:
            self._kv.compute(chunk.seq.tokens, chunk.seq.page_table, chunk.start, chunk.length)
        self.scheduler.commit(batch, [self._draw(chunk.seq) for chunk in batch.chunks if chunk.samples])
        self._checkpoints.seal_full_pages(self.scheduler)
        if self._passes("step_computed") and self._commit(self.shape, seconds) and self._passes("page_reused"):
            self._after(BETWEEN_STEPS_S, self._turn)

    def _draw(self, seq: Sequence) -> Sampled:
        return Sampled(draw(seq.params, seq.num_generated, self._kv.read(seq.page_table, len(seq.tokens))))

    def _commit(self, shape: Shape, seconds: float) -> bool:
        """Send the frame; True if the worker lives on."""
        self.phase = Phase.SEND
        if not self._passes("frame_half_written"):
            return False
        report = self.scheduler.report()
        for rid in (*(rid for rid, _, _ in report.finished), *report.preempted):
            self._checkpoints.forget(self.scheduler, rid)
        if not self.alive:
            return False
        news = self._checkpoints.collect(self.scheduler)
        self._promise(report)
        self._write(Step(self.steps, self.since, shape, seconds, self.scheduler.pool.num_reachable, report, news))
        if not self._passes("frame_written"):
            return False
        self.scheduler.sent()
        self.scheduler.check()
        self._check_promises()
        return True

    def _write(self, frame: FromWorker) -> None:
        self.socket.frames.append(frame)
        self._on_frame()

    # -- what the coordinator is promised ------------------------------------------------------------------------

    def _promise(self, report: Report) -> None:
        self.promised.apply(report)
        for rid, _, _ in report.tokens:
            if (seq := self.scheduler.running.get(rid)) is not None:
                self.promised.sampled(rid, len(seq.tokens))

    def _check_promises(self) -> None:
        """The frames sent so far say what the scheduler has."""
        running, promised = self.scheduler.running, self.promised
        assert promised.tables == {rid: seq.page_table for rid, seq in running.items()}, "the frames tell other tables"
        assert promised.computed == {rid: seq.num_computed for rid, seq in running.items()}, "… other progress"
        assert promised.hashes == self.scheduler.pool._hash_of, "… another prefix cache"

    def _held(self) -> Counter[int]:
        """Pages with promised KV, each with the number of requests that it is promised to."""
        size, promised = self._kv.page_size, self.promised
        return Counter(
            page for rid, table in promised.tables.items() for page in table[: -(-promised.computed[rid] // size)]
        )

    def _guard(self, batch: Batch) -> None:
        """A step may write to no slot that a death right now would have the coordinator trust."""
        held, size = self._held(), self._kv.page_size
        for chunk in batch.chunks:
            rid, last = chunk.seq.rid, (chunk.start + chunk.length - 1) // size
            own = self.promised.tables.get(rid, [])
            assert chunk.start >= self.promised.computed.get(rid, 0), "a step writes what is already promised"
            for page in chunk.seq.page_table[chunk.start // size : last + 1]:
                assert page not in self.promised.hashes, f"page {page} is written to while the prefix cache has it"
                assert not self._checkpoints.is_copied(page), f"page {page} is written to while it is copied"
                assert held[page] <= (page in own), f"page {page} is reused before the frame that gave it back was sent"


def _sequence(placed: Placed) -> Sequence:
    return Sequence(
        rid=placed.rid,
        epoch=placed.epoch,
        params=placed.params,
        tokens=placed.tokens,
        num_prompt=placed.num_prompt,
        page_table=list(placed.page_table),
        num_computed=placed.num_computed,
        priority=placed.priority,
        slots=list(placed.slots),
        num_sealing=placed.sealed,
        crcs=list(placed.crcs),
    )
