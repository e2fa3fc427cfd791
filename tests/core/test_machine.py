"""The core: stories (events → commands), the table of (worker phase, event) pairs, any history of a plausible shell.

`core.check()` runs after each event everywhere.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from story import STORIES, Story, Teller, read

from lumenbox.core import commands as c
from lumenbox.core import events as e
from lumenbox.core.health import GRAY_STEPS
from lumenbox.core.machine import COLD_STEPS, Core
from lumenbox.core.state import TRANSITIONS, CoreConfig, WorkerPhase

TOLD = [(path.stem, story) for path in sorted(STORIES.glob("*.txt")) for story in read(path)]


@pytest.mark.parametrize(("file", "story"), TOLD, ids=[f"{file}: {story.title}" for file, story in TOLD])
def test_story(file: str, story: Story) -> None:
    """If a change of the core is meant, rewrite with `python tests/core/story.py FILE` and read the difference."""
    assert story.retold() == story.lines


# -- every pair of worker phase and event --------------------------------------------------------------------------

TO_PHASE: dict[WorkerPhase, list[str]] = {
    WorkerPhase.STARTING: [],
    WorkerPhase.LOADING: ["ready w0", "arrive 1", "admitted w0 1 e0", "exiting w0", "settled w0 signal 1:12/11"],
    WorkerPhase.READY: ["ready w0", "arrive 1", "admitted w0 1 e0"],
    WorkerPhase.SUSPECT: ["ready w0", "arrive 1", "admitted w0 1 e0", "exiting w0"],
    WorkerPhase.DRAINING: ["ready w0", "arrive 1", "admitted w0 1 e0", "ready w1", "drain w0"],
    WorkerPhase.DRAINED: ["ready w0", "ready w1", "drain w0"],
    WorkerPhase.DEAD: ["exiting w0", "settled w0 exit own", "exiting w0", "settled w0 exit own"],
    WorkerPhase.QUARANTINED: ["exiting w0", "settled w0 exit own"] * 2
    + ["timer spawn:0", "exiting w0", "settled w0 exit own"],
}  # fmt: skip
"""Histories that lead worker 0 into each phase; `stopped` has no way in yet."""

EVENTS = {
    "ready": "ready w0", "exiting": "exiting w0", "overdue": "overdue w0", "settled": "settled w0 signal 1:12/11",
    "spawn failed": "spawn-failed w0", "step": "step w0", "admitted": "admitted w0 1 e0", "moved": "moved w0 1 e0",
    "finished": "finished 1", "gone": "gone 1", "arrive": "arrive 2", "timer": "timer spawn:0",
    "sealed": "sealed w0 1 e0 pages=1", "quiet": "quiet w0 1 e0", "restored": "restored w0 1 e0 pages=1",
    "drain": "drain w0", "resume": "resume w0", "restart": "restart w0", "upgrade": "upgrade w0",
    "shutdown": "shutdown w0", "ready, stale": "ready w0 i0", "exiting, stale": "exiting w0 i0",
    "overdue, stale": "overdue w0 i0", "spawn failed, stale": "spawn-failed w0 i0", "step, stale": "step w0 i0",
    "settled, stale": "settled w0 i0 signal",
}  # fmt: skip

P = WorkerPhase
FENCED = {phase: P.SUSPECT for phase in (P.STARTING, P.LOADING, P.READY, P.DRAINING, P.DRAINED)}
REQUESTS_OWN_PHASE = {P.DRAINING: P.DRAINED}
"""Its last request left."""
BECOMES: dict[str, dict[WorkerPhase, WorkerPhase]] = {
    "ready": {P.STARTING: P.READY, P.LOADING: P.READY},
    "exiting": FENCED,
    "overdue": FENCED,
    "spawn failed": FENCED,
    "settled": {phase: P.LOADING for phase in TRANSITIONS if P.DEAD in TRANSITIONS[phase]},
    "timer": {P.DEAD: P.LOADING},
    "drain": {P.READY: P.DRAINED},
    "resume": {P.DRAINED: P.READY},
    "restart": FENCED | {P.DEAD: P.LOADING, P.QUARANTINED: P.LOADING},
    "upgrade": FENCED | {P.DEAD: P.LOADING, P.QUARANTINED: P.LOADING},
    "moved": REQUESTS_OWN_PHASE,
    "finished": REQUESTS_OWN_PHASE,
    "gone": REQUESTS_OWN_PHASE,
}
"""What a worker's phase becomes; every pair that is not here leaves it as it is."""
RAISES = {("settled", P.DEAD), ("settled", P.QUARANTINED)} | {("settled, stale", phase) for phase in P}
"""What cannot be: an incarnation settles once, after its fence."""


def core_in(phase: WorkerPhase) -> Teller:
    teller = Teller()
    for line in TO_PHASE[phase]:
        teller.tell(line)
    assert teller.core.state.workers[0].phase == phase
    return teller


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("phase", TO_PHASE)
def test_every_pair_of_worker_phase_and_event(phase: WorkerPhase, event: str) -> None:
    teller = core_in(phase)
    if (event, phase) in RAISES:
        with pytest.raises(AssertionError):
            teller.tell(EVENTS[event])
        return
    teller.tell(EVENTS[event])
    expected = BECOMES.get(event, {}).get(phase, phase)
    if (event, phase) == ("drain", P.READY):
        expected = P.DRAINING  # it still has a request, which nobody else could take
    assert teller.core.state.workers[0].phase == expected


def test_the_table_of_pairs_has_every_phase_and_every_event() -> None:
    assert set(TO_PHASE) == set(WorkerPhase) - {WorkerPhase.STOPPED}
    tellers = Teller()
    kinds = {type(tellers._event(line.split()[0], line.split()[1:])) for line in EVENTS.values()}
    assert kinds == set(e.AnyEvent.__args__)


@pytest.mark.parametrize("event", [name for name in EVENTS if name.endswith("stale") and name != "settled, stale"])
@pytest.mark.parametrize("phase", TO_PHASE)
def test_stale_events_change_nothing_at_all(phase: WorkerPhase, event: str) -> None:
    teller, untouched = core_in(phase), core_in(phase)
    assert teller.tell(EVENTS[event]) == []
    assert teller.core.state == untouched.core.state


# -- gray failure --------------------------------------------------------------------------------------------------


def steps(teller: Teller, worker: int, count: int, seconds: float) -> list[str]:
    """Commands that answered `count` equal steps, up to the first."""
    for _ in range(count):
        if answer := teller.tell(f"step w{worker} decodes=4 context=400 s={seconds}"):
            return answer
    return []


def two_known_workers() -> Teller:
    teller = Teller()
    for line in ("ready w0", "ready w1"):
        teller.tell(line)
    for worker in (0, 1):
        assert steps(teller, worker, 40, 0.01) == []
    return teller


def test_a_worker_far_slower_than_its_peers_is_replaced_after_many_steps() -> None:
    teller = two_known_workers()
    answer: list[str] = []
    count = 0
    while not answer:
        count += 1
        steps(teller, 1, 3, 0.01)
        answer = steps(teller, 0, 1, 0.2)
        assert count < 3 * GRAY_STEPS
    assert count >= GRAY_STEPS
    assert answer == ["w0 is suspect: slow", "fence w0 i1 slow"]


def test_a_box_that_is_slow_as_a_whole_replaces_nobody() -> None:
    teller = two_known_workers()
    for _ in range(200):
        assert steps(teller, 0, 1, 0.3) == []
        assert steps(teller, 1, 1, 0.3) == []


def test_a_single_worker_has_no_peers_to_be_slower_than() -> None:
    teller = Teller()
    teller.tell("ready w0")
    steps(teller, 0, 40, 0.01)
    assert steps(teller, 0, 200, 0.5) == []


def test_single_slow_steps_are_forgiven() -> None:
    teller = two_known_workers()
    for _ in range(100):
        assert steps(teller, 0, 1, 0.2) == []
        assert steps(teller, 0, 30, 0.01) == []
        steps(teller, 1, 3, 0.01)


def test_the_first_steps_of_a_life_teach_nothing() -> None:
    teller = Teller()
    teller.tell("ready w0")
    steps(teller, 0, COLD_STEPS, 9.0)
    assert teller.core.state.model.observed == 0


# -- any history of a plausible shell ------------------------------------------------------------------------------


class Shell:
    """Performs commands as the live box does, in an order and with faults that `chance` picks; counts endings."""

    def __init__(self, config: CoreConfig, chance: random.Random) -> None:
        self.core = Core(config)
        self.chance = chance
        self.now = 0.0
        self.next_req = 1
        self.alive = dict.fromkeys(range(config.workers), 1)
        """Incarnation of each process that runs."""
        self.ready: set[int] = set()
        self.fences: list[c.Fence] = []
        self.timers: dict[str, float] = {}
        self.owned: dict[int, tuple[int, int]] = {}
        """(worker, epoch) under which each open request was assigned last."""
        self.tokens: dict[int, int] = {}
        self.moving: set[int] = set()
        self.ends: Counter[int] = Counter()
        self.closed = False

    def tell(self, event: e.AnyEvent) -> None:
        for command in self.core.handle(event):
            self._perform(command)
        self.core.check()

    def _perform(self, command: c.AnyCommand) -> None:
        match command:
            case c.Refuse(reqs=reqs):
                self._end(*reqs)
            case c.EndStream(req=req):
                self._end(req)
            case c.Assign(worker=worker, req=req, epoch=epoch, way=way):
                assert req in self.tokens, "what has ended is assigned"
                assert req not in self.owned or epoch > self.owned[req][1], "an assignment without a new epoch"
                assert way == "reattach" or worker in self.ready, "assigned to who cannot take it"
                self.owned[req] = (worker, epoch)
                self.moving.discard(req)
            case c.MoveOut(req=req):
                self.moving.add(req)
            case c.Fence(worker=worker, incarnation=incarnation):
                assert self.alive.get(worker) == incarnation, "fenced twice, or the wrong life"
                self.fences.append(command)
                self.ready.discard(worker)
            case c.Spawn(worker=worker, incarnation=incarnation):
                assert worker not in self.alive, "two lives at once"
                self.alive[worker] = incarnation
            case c.SetTimer(name=name, at=at):
                self.timers[name] = at
            case c.Exit():
                self.closed = True

    def _end(self, *reqs: int) -> None:
        for req in reqs:
            self.ends[req] += 1
            self.tokens.pop(req)
            self.owned.pop(req, None)
            self.moving.discard(req)

    # -- what may happen next ------------------------------------------------------------------------------------

    def arrive(self) -> None:
        count = self.chance.choice((1, 1, 1, 3))
        reqs = range(self.next_req, self.next_req + count)
        self.next_req += count
        self.tokens |= dict.fromkeys(reqs, self.chance.randrange(1, 3000))
        news = tuple(e.NewRequest(req, self.tokens[req], 50) for req in reqs)
        self.tell(e.RequestArrived(self.now, news, self.chance.choice((0, 0, 1))))

    def leave(self) -> None:
        if self.tokens:
            req = self.chance.choice(list(self.tokens))
            self._end(req)
            self.tell(e.ClientGone(self.now, req))

    def work(self) -> None:
        """A frame of some worker: admissions, moves, tokens, ends."""
        if not self.ready:
            return
        worker = self.chance.choice(sorted(self.ready))
        for req, (owner, epoch) in list(self.owned.items()):
            if owner == worker and req in self.owned:
                self._work_on(worker, req, epoch)
        self.tell(e.StepCommitted(self.now, worker, self.alive[worker], 1, 2, 0, 50, 0.01, 50))

    def _work_on(self, worker: int, req: int, epoch: int) -> None:
        if req in self.moving:
            self.moving.discard(req)
            self.tell(e.MovedOut(self.now, worker, req, epoch, self.tokens[req]))
            return
        self.tell(e.Admitted(self.now, worker, req, epoch, 0))
        self.tokens[req] += 1
        if self.chance.random() < 0.15:
            self._end(req)
            self.tell(e.RequestFinished(self.now, req, 5))

    def die(self) -> None:
        if self.alive:
            worker = self.chance.choice(sorted(self.alive))
            self.ready.discard(worker)
            if self.chance.random() < 0.7:
                self.tell(e.WorkerExiting(self.now, worker, self.alive[worker], "pidfd"))
            else:
                self.tell(e.StepOverdue(self.now, worker, self.alive[worker], 1, 0.3))

    def settle(self) -> None:
        if self.fences:
            fence = self.fences.pop(self.chance.randrange(len(self.fences)))
            del self.alive[fence.worker]
            own = fence.cause in ("exit", "hang") and self.chance.random() < 0.4
            lost = tuple(
                e.Interrupted(req, self.tokens[req], self.chance.choice((0, self.tokens[req] - 1)))
                for req, (worker, _) in self.owned.items()
                if worker == fence.worker
            )
            cause = {"exit": "signal"}.get(fence.cause, fence.cause)
            gone = self.chance.random() < 0.1
            self.tell(e.Settled(self.now, fence.worker, fence.incarnation, cause, own, gone, lost))

    def be_born(self) -> None:
        fenced = {fence.worker for fence in self.fences}
        coming = [worker for worker in self.alive if worker not in self.ready | fenced]
        if coming:
            worker = self.chance.choice(coming)
            if self.chance.random() < 0.1:
                self.tell(e.SpawnFailed(self.now, worker, self.alive[worker], "no memory"))
            else:
                self.ready.add(worker)
                self.tell(e.WorkerReady(self.now, worker, self.alive[worker], 100, True))

    def ask(self) -> None:
        verb = self.chance.choice(("drain", "resume", "resume", "restart", "upgrade"))
        self.tell(e.OperatorAsked(self.now, verb, self.chance.randrange(self.core.state.config.workers)))

    def ring(self) -> None:
        if self.timers:
            name = self.chance.choice(list(self.timers))
            self.now = max(self.now, self.timers.pop(name))
            self.tell(e.TimerFired(self.now, name))

    def echo(self) -> None:
        """Late words of former lives and epochs."""
        worker = self.chance.randrange(self.core.state.config.workers)
        stale = self.core.state.workers[worker].incarnation - 1
        self.tell(e.WorkerExiting(self.now, worker, stale, "eof"))
        self.tell(e.WorkerReady(self.now, worker, stale, 100, False))
        for req, (owner, epoch) in list(self.owned.items()):
            self.tell(e.Admitted(self.now, owner, req, epoch - 1, 0))
            self.tell(e.MovedOut(self.now, owner, req, epoch - 1, 7))

    def calm(self) -> None:
        """No more faults: everything settles, is born, and ends."""
        for name in [*self.timers]:
            self.now = max(self.now, self.timers[name])
        for _ in range(400):
            for move in (self.settle, self.ring, self.be_born, self.work):
                move()
            for worker in range(self.core.state.config.workers):
                self.tell(e.OperatorAsked(self.now, "resume", worker))


MOVES = ["arrive", "leave", "work", "die", "settle", "be_born", "ask", "ring", "echo"]
OFTEN = ["arrive", "work", "work", "settle", "be_born"]


@settings(max_examples=120)
@given(
    st.integers(1, 4),
    st.sampled_from(["none", "restart", "box"]),
    st.booleans(),
    st.lists(st.sampled_from(MOVES + OFTEN), max_size=120),
    st.integers(0, 2**32),
)
def test_any_history_ends_every_request_once(
    workers: int, recovery: str, respawn: bool, moves: list[str], seed: int
) -> None:
    shell = Shell(CoreConfig(workers, 16, 20, 4096, recovery, respawn), random.Random(seed))
    for move in moves:
        shell.now += 0.01
        if not shell.closed:
            getattr(shell, move)()
    if not shell.closed:
        shell.calm()
    state = shell.core.state
    someone_serves = any(worker.phase == WorkerPhase.READY for worker in state.workers.values())
    assert someone_serves or not respawn or shell.closed
    assert not state.requests
    assert shell.ends == Counter(range(1, shell.next_req))
