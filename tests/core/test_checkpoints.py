"""The arena's accounts under any history, with slots that hold what was written there, and writers that are late."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_machine import MOVES, OFTEN, Shell

from lumenbox.core import commands as c
from lumenbox.core import coverage
from lumenbox.core import events as e
from lumenbox.core.machine import Core
from lumenbox.core.state import CheckpointConfig, CoreConfig, CoreState, WorkerPhase

SIZE = 16
Key = tuple[int, int, int]
"""(worker, request, epoch)"""


class ArenaShell(Shell):
    """Workers that write pages to slots, forget, acknowledge and load them, each when `chance` has it.

    A slot remembers which page of which request was written last. What is said to be sealed must be there when an heir
    gets it, though every writer scribbles into the slots that it has not acknowledged yet.
    """

    def __init__(self, config: CoreConfig, chance: random.Random) -> None:
        super().__init__(config, chance)
        self.arena: dict[int, tuple[int, int]] = {}
        self.slots: dict[Key, list[tuple[int, ...]]] = {}
        self.written: dict[Key, int] = {}
        self.dropped: dict[Key, list[tuple[int, ...]]] = {}
        self.loading: dict[Key, int] = {}
        self.pages: dict[int, int] = {}
        self.held_back = set[int]()

    def tell(self, event: e.AnyEvent) -> None:
        if isinstance(event, e.Settled):
            for place in (self.slots, self.written, self.dropped, self.loading):
                for key in [key for key in place if key[0] == event.worker]:
                    del place[key]  # type: ignore[attr-defined]
            self.held_back.discard(event.worker)
        super().tell(event)
        for worker in self.core.state.workers.values():
            assert worker.is_held_back == (worker.id in self.held_back)

    def _perform(self, command: c.AnyCommand) -> None:
        super()._perform(command)
        match command:
            case c.Assign(worker=worker, req=req, epoch=epoch, way=way, slots=slots, sealed=sealed):
                assert sealed <= len(slots)
                for number, page in enumerate(slots[:sealed]):
                    assert all(self.arena[slot] == (req, number) for slot in page), "a sealed page was overwritten"
                assert (way == "restore") <= (sealed > 0)
                key = (worker, req, epoch)
                self.slots[key], self.written[key] = list(slots), sealed
                if way == "restore":
                    self.loading[key] = sealed
            case c.ReserveSlots(worker=worker, req=req, epoch=epoch, first=first, slots=slots):
                assert first == len(self.slots[worker, req, epoch])
                self.slots[worker, req, epoch] += slots
            case c.DropSlots(worker=worker, req=req, epoch=epoch):
                self._lets_go((worker, req, epoch))
                self.slots[worker, req, epoch] = []
            case c.Cancel(worker=worker, req=req, epoch=epoch):
                self.loading.pop((worker, req, epoch), None)
                if worker in self.ready:  # who is not born yet does not hear it
                    self._lets_go((worker, req, epoch))
            case c.PreRestore(worker=worker, req=req, epoch=epoch, slots=slots):
                assert worker in self.ready
                assert slots
                self.loading[worker, req, epoch] = len(slots)
            case c.SetSealRate(worker=worker, bytes_s=bytes_s):
                (self.held_back.discard if bytes_s else self.held_back.add)(worker)

    def _lets_go(self, key: Key) -> None:
        """From now on it writes late into what it had not finished, until it acknowledges."""
        slots = self.slots.pop(key, [])
        self.dropped[key] = self.dropped.get(key, []) + slots[self.written.pop(key, 0) :]
        self.written[key] = 0

    def _work_on(self, worker: int, req: int, epoch: int) -> None:
        key = (worker, req, epoch)
        if key in self.loading and req not in self.moving:
            return
        moves = req in self.moving
        self.loading.pop(key, None)
        super()._work_on(worker, req, epoch)
        if moves or req not in self.tokens:
            self._lets_go(key)

    # -- what may happen next ------------------------------------------------------------------------------------

    def cross(self) -> None:
        """Requests of a worker complete pages."""
        if not self.ready:
            return
        worker = self.chance.choice(sorted(self.ready))
        mine = [req for req, (owner, epoch) in self.owned.items() if owner == worker]
        for req in mine:
            self.pages[req] = self.pages.get(req, 0) + self.chance.choice((0, 1, 1, 4))
        crossings = tuple((req, self.pages[req]) for req in mine)
        self.tell(e.StepCommitted(self.now, worker, self.alive[worker], 1, 2, 0, 50, 0.01, 50, crossings))

    def seal(self) -> None:
        """Some worker writes its pages; now and then it does not come to tell."""
        for (worker, req, epoch), slots in list(self.slots.items()):
            key, count = (worker, req, epoch), self.written[worker, req, epoch]
            if worker in self.ready and key not in self.loading and count < len(slots) and self.chance.random() < 0.7:
                for slot in slots[count]:
                    self.arena[slot] = (req, count)
                self.written[key] += 1
                if self.chance.random() < 0.9:
                    self.tell(e.PagesSealed(self.now, worker, ((req, epoch, count + 1),)))

    def scribble(self) -> None:
        """Copies that were on their way arrive, in slots that nobody wants any more."""
        for slots in self.dropped.values():
            for page in slots:
                self.arena |= dict.fromkeys(page, (-1, -1))

    def hush(self) -> None:
        """A writer acknowledges."""
        keys = [key for key in self.dropped if key[0] in self.ready]
        if keys:
            key = self.chance.choice(keys)
            del self.dropped[key]
            self.tell(e.SlotsQuiet(self.now, *key))

    def load(self) -> None:
        """An heir has loaded what it was given, or less."""
        keys = [key for key in self.loading if key[0] in self.ready]
        if keys:
            key = self.chance.choice(keys)
            given = self.loading.pop(key)
            pages = given if self.chance.random() < 0.8 else self.chance.randrange(given + 1)
            if self.owned.get(key[1]) == (key[0], key[2]):
                self.written[key] = pages
            self.tell(e.RestoreDone(self.now, *key, pages, pages * 100, 0.01))

    def calm(self) -> None:
        """No more faults: everything settles, is born, loads, ends and is acknowledged."""
        while self.timers:
            self.ring()
        for _ in range(400):
            for move in (self.settle, self.ring, self.be_born, self.load, self.work, self.hush):
                move()
            for worker in range(self.core.state.config.workers):
                if self.core.state.workers[worker].phase == WorkerPhase.DRAINED:
                    self.tell(e.OperatorAsked(self.now, "resume", worker))
            if not self.tokens and not self.dropped and not self.loading and len(self.ready) == len(self.alive):
                return


ARENA_MOVES = ["cross", "seal", "cross", "seal", "scribble", "hush", "load"]


@st.composite
def configs(draw: st.DrawFn, always: bool = False) -> CoreConfig:
    """`always`: one that does make KV checkpoints."""
    workers = draw(st.integers(1 + always, 5))
    domains = draw(st.sampled_from(((), ((0, 1), (2, 3)), ((0,), (1, 2, 3, 4)), (tuple(range(5)),))))
    checkpoints = CheckpointConfig(
        placement=draw(st.sampled_from(("fixed", "load-aware") if always else ("", "fixed", "load-aware", "none"))),
        routing=draw(st.sampled_from(("", "", "holder", "locality-aware", "least-loaded", "cost"))),
        budget_pages=draw(st.sampled_from((4, 12, 40, 400) if always else (0, 1, 4, 12, 40))),
        replicas=draw(st.integers(1, 2)),
        failure_domains=domains,
        load_estimate=draw(st.sampled_from(("pages", "seconds"))),
        routing_rule=draw(st.sampled_from(("threshold", "mean"))),
        eviction=draw(st.sampled_from(("shortest_prefix", "lru", "priority"))),
    )
    recovery = draw(st.sampled_from(("fixed", "lumen", "box") if always else ("none", "restart", "lumen", "box")))
    return CoreConfig(workers, SIZE, 20, 4096, recovery, True, checkpoints)


@settings(max_examples=150, deadline=None)
@given(configs(), st.lists(st.sampled_from(MOVES + OFTEN + ARENA_MOVES), max_size=150), st.integers(0, 2**32))
def test_any_history_keeps_the_accounts(config: CoreConfig, moves: list[str], seed: int) -> None:
    shell = ArenaShell(config, random.Random(seed))
    for move in moves:
        shell.now += 0.01
        if not shell.closed:
            getattr(shell, move)()
            assert 0.0 <= coverage.coverage(shell.core.state) <= 1.0
    if not shell.closed:
        shell.calm()
        check_everything_is_free(shell)
    assert not shell.core.state.requests


def check_everything_is_free(shell: ArenaShell) -> None:
    state = shell.core.state
    arena = state.arena
    assert not arena.checkpoints
    assert not arena.unquiet
    assert sorted(arena.free) == list(range(arena.fresh))
    assert all(worker.held_pages == 0 for worker in state.workers.values())
    assert not shell.held_back


@settings(max_examples=120, deadline=None)
@given(configs(always=True), st.integers(0, 2**32))
def test_any_long_history_keeps_the_accounts(config: CoreConfig, seed: int) -> None:
    """Many requests, pages and moves between faults; longer than hypothesis would draw them one by one."""
    chance = random.Random(seed)
    shell = ArenaShell(config, chance)
    busy = ["arrive", "work", "cross", "cross", "seal", "seal", "load", "hush", "hush", "be_born", "settle"]
    faults = MOVES + ["ask"] * chance.choice((0, 5)) + ["leave"] * chance.choice((0, 3))
    for move in chance.choices(busy * chance.choice((3, 8, 20)) + faults + ["scribble"] * 9, k=600):
        shell.now += 0.01
        if not shell.closed:
            getattr(shell, move)()
    if not shell.closed:
        shell.calm()
        check_everything_is_free(shell)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_a_snapshot_goes_on_to_the_same_commands(seed: int) -> None:
    chance = random.Random(seed)
    checkpoints = CheckpointConfig(budget_pages=12, replicas=2)
    shell = ArenaShell(CoreConfig(3, SIZE, 20, 4096, "lumen", True, checkpoints), chance)
    for move in chance.choices(MOVES + OFTEN + ARENA_MOVES, k=60):
        getattr(shell, move)()
    copied = msgspec.msgpack.decode(msgspec.msgpack.encode(shell.core.state), type=CoreState)
    twin = Core(state=copied)
    for event in (e.OperatorAsked(9.0, "drain", 1), e.WorkerExiting(9.0, 0, shell.alive.get(0, 0), "eof")):
        assert twin.handle(event) == shell.core.handle(event)
    assert twin.state == shell.core.state


# -- what it looks like --------------------------------------------------------------------------------------------


def served(*sealed: int) -> ArenaShell:
    """Requests of 100 tokens on worker 0, of which so many pages are sealed on workers 1 and 2."""
    shell = ArenaShell(
        CoreConfig(3, SIZE, 99, 4096, "lumen", True, CheckpointConfig(budget_pages=50)), random.Random(1)
    )
    for worker in range(3):
        shell.ready.add(worker)
        shell.tell(e.WorkerReady(0.0, worker, 1, 1000, False))
    shell.tokens |= dict.fromkeys(range(len(sealed)), 100)
    shell.tell(e.RequestArrived(0.0, tuple(e.NewRequest(req, 100, 50) for req in range(len(sealed)))))
    for req, pages in enumerate(sealed):
        shell.tell(e.Admitted(0.0, 0, req, 0, 0))
        shell.tell(e.StepCommitted(0.0, 0, 1, 1, 1, 100, 100, 0.01, 900, ((req, 6),)))
        shell.tell(e.PagesSealed(0.0, 0, ((req, 0, pages),)))
    return shell


def test_coverage_lag_and_balance() -> None:
    """Six whole pages each: two of three requests have some sealed; lags 96, 80, 32 tokens. 7 slots each."""
    state = served(0, 1, 4).core.state
    assert coverage.coverage(state) == pytest.approx(2 / 3)
    assert coverage.lag_tokens(state, {}) == pytest.approx((96 + 80 + 32) / 3)
    assert coverage.lag_tokens(state, {0: 100, 1: 100, 2: 64}) == pytest.approx((100 + 84 + 0) / 3)
    assert [w.held_pages for w in state.workers.values()] == [0, 14, 7]
    assert coverage.holder_balance(state) == float("inf")
    state.workers[0].held_pages = 7
    assert coverage.holder_balance(state) == 2.0


def test_of_an_idle_box() -> None:
    state = served().core.state
    assert (coverage.coverage(state), coverage.holder_balance(state), coverage.lag_tokens(state, {})) == (1.0, 1.0, 0.0)


def test_the_bandwidth_is_measured_and_smoothed() -> None:
    shell = served(3)
    state = shell.core.state
    assert state.restore_bytes_s == state.config.checkpoints.bandwidth_bytes_s
    shell.core.handle(e.RestoreDone(0.0, 1, 77, 0, 3, 1000, 0.5))
    assert state.restore_bytes_s == 2000
    shell.core.handle(e.RestoreDone(0.0, 1, 77, 0, 3, 1000, 0.25))
    assert state.restore_bytes_s == pytest.approx(2000 + 0.2 * 2000)
    shell.core.handle(e.RestoreDone(0.0, 1, 77, 0, 0, 0, 0.25))
    assert state.restore_bytes_s == pytest.approx(2400)


def test_words_about_slots_of_nobody_change_nothing() -> None:
    shell = served(3)
    before = msgspec.msgpack.encode(shell.core.state)
    for event in (
        e.PagesSealed(0.0, 0, ((0, 1, 6), (9, 0, 2))),
        e.PagesSealed(0.0, 1, ((0, 0, 6),)),
        e.PagesSealed(0.0, 0, ((0, 0, 2),)),
        e.SlotsQuiet(0.0, 0, 0, 0),
        e.SlotsQuiet(0.0, 2, 9, 3),
    ):
        assert shell.core.handle(event) == []
    assert msgspec.msgpack.encode(shell.core.state) == before
