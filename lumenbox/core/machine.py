"""The state machine that decides everything: `handle(event) -> [command]` is the only way to change its state.

It reads like DESIGN §5: noticed (`_exiting`, `_overdue`), fenced and settled (`_settled`), planned (`recovery`),
reborn (`_ready`). Who owns a request at any moment is in `state.RequestPhase`; what a worker may become next in
`state.TRANSITIONS`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from lumenbox.core import commands as c
from lumenbox.core import events as e
from lumenbox.core import health, rebalancing, recovery
from lumenbox.core.checkpoints import Checkpoints
from lumenbox.core.commands import AnyCommand
from lumenbox.core.routing import least_wait, predicted_wait_s
from lumenbox.core.state import (
    SERVING,
    TRANSITIONS,
    CoreConfig,
    CoreState,
    Request,
    RequestPhase,
    Worker,
    WorkerPhase,
)

EARLY_DEATHS = 3
EARLY_DEATH_WINDOW_S = 60.0
BACKOFF_S = 0.5
"""Pause before the second try of an incarnation that died of its own making before its first step; doubles."""
FOLLOW_S = 2.0
"""A request that moves waits so long for its next page to be sealed: a slow worker fills one too late."""
COLD_STEPS = 2
"""The first steps of an incarnation are slow for reasons of their own, and teach nothing."""
PLANNED_CAUSES = ("drain", "restart", "upgrade")


class Core:
    """Told by events, answers with commands. Raises AssertionError when told what cannot be."""

    def __init__(self, config: CoreConfig | None = None, state: CoreState | None = None) -> None:
        if state is None:
            assert config is not None
            state = CoreState(config, {i: Worker(i) for i in range(config.workers)})
        self.state = state
        self.checkpoints = Checkpoints(state, self._tell, self._serving)
        self._out: list[AnyCommand] = []
        self._now = 0.0
        self._ready_workers: list[Worker] | None = None

    def handle(self, event: e.AnyEvent) -> list[AnyCommand]:  # noqa: PLR0912 (one case an event)
        """Change the state as the event demands and tell what is to be done."""
        self._out, self._now = [], event.now
        match event:
            case e.StepCommitted():
                self._step_committed(event)
            case e.RequestArrived():
                self._arrived(event)
            case e.Admitted():
                self._admitted(event)
            case e.PagesSealed():
                self._sealed(event)
            case e.RequestFinished():
                self._forget(event.req)
            case e.SlotsQuiet():
                self.checkpoints.quiet(event)
            case e.ClientGone():
                self._client_gone(event)
            case e.RestoreDone():
                self._restored(event)
            case e.MovedOut():
                self._moved_out(event)
            case e.WorkerReady():
                self._ready(event)
            case e.WorkerExiting():
                self._exiting(event)
            case e.StepOverdue():
                self._overdue(event)
            case e.Settled():
                self._settled(event)
            case e.SpawnFailed():
                self._spawn_failed(event)
            case e.OperatorAsked():
                self._operator_asked(event)
            case e.TimerFired():
                self._timer_fired(event)
            case _:
                assert_never(event)
        return self._out

    # -- requests ------------------------------------------------------------------------------------------------

    def _arrived(self, event: e.RequestArrived) -> None:
        reqs = tuple(new.req for new in event.requests)
        if refusal := self._refusal(len(reqs)):
            self._out.append(c.Refuse(reqs, refusal, self._retry_after_s()))
            return
        for new in event.requests:
            request = Request(new.req, reqs[0], new.prompt_len, new.max_new, event.priority, event.now)
            request.limit = min(self.state.config.max_model_len, new.prompt_len + new.max_new)
            self.state.requests[new.req] = request
        self._place([self.state.requests[req] for req in reqs], "new")

    def _refusal(self, count: int) -> str | None:
        """Why `count` more requests cannot be taken, None if they can."""
        if self.state.closing:
            return "draining"
        if not self._serving():
            if not self.state.has_served:
                return "loading"
            if not self._is_hopeful():
                return "no_worker"
        if self.num_waiting + count > self.state.config.max_queue:
            return "queue_full"
        return None

    def _retry_after_s(self) -> int:
        waits = [predicted_wait_s(self.state, w, 1) for w in self._serving()]
        return int(min(120, max(1, min(waits, default=self.state.birth_s))))

    def _place(self, requests: list[Request], way: str) -> None:
        """Give requests of one group to the worker with the least predicted wait, or hold them."""
        tokens = sum(request.tokens for request in requests)
        heir = least_wait(self.state, self._serving(), tokens)
        for request in requests:
            if heir is None:
                self._hold(request)
            else:
                self._assign(request, heir, way)

    def _hold(self, request: Request) -> None:
        request.phase, request.worker = RequestPhase.HELD, -1
        self.state.held[request.req] = True

    def _assign(self, request: Request, worker: Worker, way: str) -> None:
        """The worker owns it from now on, and restores it if that is the way."""
        self.state.held.pop(request.req, None)
        request.worker, request.phase, request.pages = worker.id, RequestPhase.ASSIGNED, 0
        worker.requests[request.req] = True
        worker.backlog[request.req] = request.tokens
        worker.backlog_tokens += request.tokens
        self.state.num_backlog += 1
        self.checkpoints.moved(request)
        if way == "restore":
            self._restore_begins(worker, request)
        self._tell_owner(request, way)

    def _restore_begins(self, worker: Worker, request: Request) -> None:
        """It seals nothing meanwhile: who waits for a page to be sealed there waits no longer."""
        self.checkpoints.restore_begins(worker, request, self._now)
        for req in worker.requests if worker.is_held_back else ():
            if self.state.requests[req].follows:
                self._move_out(self.state.requests[req])

    def _tell_owner(self, request: Request, way: str) -> None:
        checkpoint = self.state.arena.checkpoints.get(request.req)
        slots, sealed = (tuple(checkpoint.slots), checkpoint.sealed) if checkpoint is not None else ((), 0)
        self._out.append(c.Assign(request.worker, request.req, request.epoch, way, slots, sealed))

    def _place_held(self) -> None:
        held = [self.state.requests[req] for req in self.state.held]
        for request in sorted(held, key=lambda r: (r.priority, r.arrived, r.req)):
            self._place([request], self._way_back(request) if request.epoch else "new")

    def _way_back(self, request: Request) -> str:
        return "restore" if self.state.num_sealed(request.req) else "recompute"

    def _admitted(self, event: e.Admitted) -> None:
        request = self.state.requests.get(event.req)
        if request is None or request.epoch != event.epoch or request.worker != event.worker:
            return
        self._leave_backlog(self.state.workers[event.worker], event.req)
        if request.phase in (RequestPhase.ASSIGNED, RequestPhase.RETURNING):
            request.phase = RequestPhase.RUNNING
        if request.phase == RequestPhase.RUNNING:
            self.checkpoints.begins(request, event.now)

    def _client_gone(self, event: e.ClientGone) -> None:
        request = self.state.requests.get(event.req)
        if request is not None:
            if request.worker >= 0:
                self._out.append(c.Cancel(request.worker, request.req, request.epoch))
            self._forget(event.req)

    def _moved_out(self, event: e.MovedOut) -> None:
        request = self.state.requests.get(event.req)
        if request is None or request.epoch != event.epoch or request.phase != RequestPhase.MOVING:
            return
        heir = self.state.workers.get(request.heir)
        if heir is not None and heir.phase not in SERVING:
            self._leave_heir(request)
            heir = None
        self.checkpoints.leaves(request)
        self._take_from_owner(request)
        request.epoch += 1
        request.tokens, request.heir = event.tokens, -1
        if heir is not None:
            self._assign(request, heir, self._way_back(request))
        else:
            self._place([request], self._way_back(request))
        self._moved_away(self.state.workers[event.worker])

    def _forget(self, req: int) -> None:
        request = self.state.requests.pop(req, None)
        if request is None:
            return
        self.checkpoints.ended(request)
        self._leave_heir(request)
        self.state.held.pop(req, None)
        if request.worker >= 0:
            worker = self.state.workers[request.worker]
            self._take_from_owner(request)
            self._moved_away(worker)

    def _take_from_owner(self, request: Request) -> None:
        worker = self.state.workers[request.worker]
        del worker.requests[request.req]
        self._leave_backlog(worker, request.req)
        self.checkpoints.restore_ends(worker, request.req)
        request.worker = -1

    def _leave_backlog(self, worker: Worker, req: int) -> None:
        if req in worker.backlog:
            worker.backlog_tokens -= worker.backlog.pop(req)
            self.state.num_backlog -= 1

    # -- workers -------------------------------------------------------------------------------------------------

    def _step_committed(self, event: e.StepCommitted) -> None:
        worker = self.state.workers[event.worker]
        if event.incarnation != worker.incarnation:
            return
        worker.free_pages = event.free_pages
        worker.context_tokens = event.context_tokens
        worker.committed_steps += 1
        self.state.has_stepped = True
        if worker.early_deaths:
            worker.early_deaths = []
        for req, pages in event.page_crossings:
            request = self.state.requests.get(req)
            if request is not None and request.worker == worker.id and request.phase == RequestPhase.RUNNING:
                self.checkpoints.crossed(request, pages, event.now)
        if worker.committed_steps > COLD_STEPS:
            if worker.committed_steps == COLD_STEPS + 1:
                self._rebalance(worker)
            self._learn(worker, event)

    def _learn(self, worker: Worker, step: e.StepCommitted) -> None:
        """Keep the step model and the worker's pace; a worker far slower than its peers for long is replaced."""
        model = self.state.model
        if worker.pace > health.GRAY_FACTOR and self._is_gray(worker):
            # the model must not take a gray worker's slowness for the law
            predicted = model.seconds(step) if model.knows(step) else None
            worker.gray_steps += 1
            if worker.gray_steps >= health.GRAY_STEPS:
                self._suspect(worker, "slow")
        else:
            predicted = model.observe(step, step.seconds)
            if worker.gray_steps:
                worker.gray_steps -= 1
        if predicted is not None:
            worker.set_pace(health.next_pace(worker.pace, step.seconds, predicted))

    def _is_gray(self, worker: Worker) -> bool:
        peers = [w.pace for w in self._serving() if w.id != worker.id]
        return worker.phase in SERVING and health.is_gray(worker.pace, peers)

    def _ready(self, event: e.WorkerReady) -> None:
        worker = self.state.workers[event.worker]
        if event.incarnation != worker.incarnation or worker.phase not in (WorkerPhase.STARTING, WorkerPhase.LOADING):
            return
        worker.pages = worker.free_pages = event.pages
        self._become(worker, WorkerPhase.READY, "attached" if event.pool_kept else "started")
        self.state.has_served = worker.is_born = True
        if worker.id in self.state.died_at:
            self.state.birth_s += 0.5 * (event.now - self.state.died_at.pop(worker.id) - self.state.birth_s)
        self.checkpoints.born(worker)
        is_alone = len(self._serving()) == 1
        if worker.is_to_drain and not is_alone:
            self._drain(worker)
        self._place_held()
        if worker.is_to_drain and is_alone:
            self._drain(worker)  # what nobody else can take finishes here

    def _exiting(self, event: e.WorkerExiting) -> None:
        worker = self.state.workers[event.worker]
        if event.incarnation == worker.incarnation and self._is_alive(worker):
            self._suspect(worker, "exit")

    def _overdue(self, event: e.StepOverdue) -> None:
        worker = self.state.workers[event.worker]
        if event.incarnation == worker.incarnation and self._is_alive(worker):
            self._suspect(worker, "hang")

    def _is_alive(self, worker: Worker) -> bool:
        return WorkerPhase.SUSPECT in TRANSITIONS[worker.phase]

    def _suspect(self, worker: Worker, cause: str) -> None:
        self._become(worker, WorkerPhase.SUSPECT, cause)
        self._out.append(c.Fence(worker.id, worker.incarnation, cause))
        self._heir_died(worker)

    def _settled(self, event: e.Settled) -> None:
        worker = self.state.workers[event.worker]
        assert event.incarnation == worker.incarnation, "settled twice"
        self._become(worker, WorkerPhase.DEAD, event.cause)
        if event.cause not in PLANNED_CAUSES:
            self.state.deaths += 1
        self.checkpoints.died(worker)
        guilty = self._guilty(worker, event) if event.own_making and worker.is_born else []
        delay = self._rebirth_delay_s(worker, event, guilty)
        if self._serving():
            self._place_held()  # who waited for this birth waits no more
        for request in guilty:
            self._end(request.req, "worker_died")
        self._plan(worker, event, delay)
        self.checkpoints.holder_died(worker)
        worker.incarnation += 1
        worker.renewal, worker.is_born = "", False
        worker.committed_steps = worker.gray_steps = worker.context_tokens = 0
        worker.set_pace(1.0)
        self.state.died_at.pop(worker.id, None)
        if delay == 0:
            self.state.died_at[worker.id] = event.now  # a birth that had to wait is no measure
            self._spawn(worker, _keeps_pool(event, delay))
        elif delay is not None:
            self._out.append(c.SetTimer(f"spawn:{worker.id}", event.now + delay))
        elif not self._is_hopeful():
            self._give_up()

    def _guilty(self, worker: Worker, event: e.Settled) -> list[Request]:
        """Requests that were there when a worker died of its own making for the second time; the others are suspect."""
        guilty: list[Request] = []
        for req in worker.requests:
            request = self.state.requests[req]
            if request.suspect is None:
                request.suspect = (worker.id, event.now)
            else:
                guilty.append(request)
        return guilty

    def _rebirth_delay_s(self, worker: Worker, event: e.Settled, guilty: list[Request]) -> float | None:
        """Seconds until the next incarnation may start; None if there is to be none.

        What a guilty request did says nothing against the slots, unless it was one and the same slot both times, or no
        worker has ever done a step: then what they have in common is broken.
        """
        if not self.state.config.respawn and event.cause not in PLANNED_CAUSES and not worker.renewal:
            return None
        firsts = [request.suspect for request in guilty if request.suspect is not None and self.state.has_stepped]
        for slot, at in firsts:
            before = self.state.workers[slot]
            before.early_deaths = [t for t in before.early_deaths if t != at]
        if not event.own_making or worker.committed_steps or any(slot != worker.id for slot, _ in firsts):
            return 0.0
        recent = [t for t in worker.early_deaths if t > event.now - EARLY_DEATH_WINDOW_S]
        worker.early_deaths = [*recent, event.now]
        if len(worker.early_deaths) >= EARLY_DEATHS:
            self._become(worker, WorkerPhase.QUARANTINED, f"{EARLY_DEATHS} deaths before a first step")
            return None
        return 0.0 if not recent else BACKOFF_S * 2.0 ** (len(recent) - 1)

    def _spawn(self, worker: Worker, keep_pool: bool) -> None:
        self._become(worker, WorkerPhase.LOADING, "")
        worker.restarts += 1
        self._out.append(c.Spawn(worker.id, worker.incarnation, keep_pool))

    def _spawn_failed(self, event: e.SpawnFailed) -> None:
        worker = self.state.workers[event.worker]
        if event.incarnation == worker.incarnation and self._is_alive(worker):
            self._suspect(worker, "exit")

    def _timer_fired(self, event: e.TimerFired) -> None:
        kind, _, number = event.name.partition(":")
        if kind == "follow":
            request = self.state.requests.get(int(number))
            if request is not None and request.follows:
                self._move_out(request)
        elif kind == "seal":
            self.checkpoints.seals_again(self.state.workers[int(number)])
        elif (worker := self.state.workers[int(number)]).phase == WorkerPhase.DEAD:
            self._spawn(worker, keep_pool=False)

    # -- recovery ------------------------------------------------------------------------------------------------

    def _plan(self, worker: Worker, event: e.Settled, delay: float | None) -> None:
        """Choose and start the way of every request that the dead worker owned."""
        known = {lost.req: lost for lost in event.interrupted}
        owned = [self.state.requests[req] for req in worker.requests]
        interrupted = [known.get(r.req, e.Interrupted(r.req, r.tokens, 0)) for r in owned]
        rebirth_s = float("inf") if delay is None else delay + self.state.birth_s
        case = recovery.Case(self.state, worker, self._serving(), _keeps_pool(event, delay), rebirth_s)
        ways = recovery.plan(case, interrupted)
        if event.own_making and worker.is_born:
            ways = self._together(case, ways, interrupted)
        lost_by_req = {lost.req: lost for lost in interrupted}
        for req, way in ways.items():
            self._send_on(lost_by_req[req], way)
        told = tuple((lost.req, ways[lost.req].way, ways[lost.req].heir) for lost in interrupted)
        self._out.append(c.Planned(worker.id, event.incarnation, event.cause, self.state.config.recovery, told))

    def _together(self, case: recovery.Case, ways: recovery.Plan, interrupted: list[e.Interrupted]) -> recovery.Plan:
        """Suspects share one worker, so that the guilty one takes no more than that worker with it."""
        tokens = sum(lost.tokens for lost in interrupted)
        heir = least_wait(self.state, case.survivors, tokens)
        shared: recovery.Plan = {}
        for lost in interrupted:
            way = recovery.Way("hold") if heir is None else case.sent_to(lost.req, heir.id)
            shared[lost.req] = ways[lost.req] if ways[lost.req].way == "end" else way
        return recovery.in_order(case, shared)

    def _send_on(self, lost: e.Interrupted, way: recovery.Way) -> None:
        request = self.state.requests[lost.req]
        if way.way == "end":
            self._end(lost.req, "worker_lost")
            return
        if request.heir != way.heir or way.way != "restore":
            self._leave_heir(request)
        request.epoch += 1
        request.tokens, request.heir, request.follows = lost.tokens, -1, False
        if way.way == "reattach":
            worker = self.state.workers[request.worker]
            self._leave_backlog(worker, request.req)
            request.phase = RequestPhase.RETURNING
            self._tell_owner(request, "reattach")
            return
        self._take_from_owner(request)
        if way.way == "hold":
            self._hold(request)
        else:
            self._assign(request, self.state.workers[way.heir], way.way)

    def _end(self, req: int, code: str) -> None:
        self._out.append(c.EndStream(req, code))
        self._forget(req)

    def _is_hopeful(self) -> bool:
        """Whether any slot serves, or will without being told to."""
        hopeful = {*SERVING, WorkerPhase.STARTING, WorkerPhase.LOADING, WorkerPhase.SUSPECT}
        if self.state.config.respawn:
            hopeful.add(WorkerPhase.DEAD)  # it waits out its back-off
        return any(worker.phase in hopeful for worker in self.state.workers.values())

    def _give_up(self) -> None:
        """No worker will come back: end what is held, and the box too if every slot is quarantined."""
        for req in list(self.state.held):
            self._end(req, "worker_lost")
        if all(w.phase == WorkerPhase.QUARANTINED for w in self.state.workers.values()):
            self._out.append(c.Exit(1, "every worker is quarantined: each died before its first step, again and again"))

    # -- the operator --------------------------------------------------------------------------------------------

    def _operator_asked(self, event: e.OperatorAsked) -> None:
        if event.verb == "shutdown":
            self.state.closing = True
            return
        worker = self.state.workers[event.worker]
        match event.verb:
            case "drain" if worker.phase == WorkerPhase.READY:
                worker.is_to_drain = True
                self._drain(worker)
            case "restart" | "upgrade" if worker.phase == WorkerPhase.READY:
                self._renew(worker, event.verb)
            case "resume" if worker.phase == WorkerPhase.DRAINED:
                worker.is_to_drain = False
                self._become(worker, WorkerPhase.READY, "resumed")
                self._place_held()
                if worker.committed_steps > COLD_STEPS:
                    self._rebalance(worker)
            case "restart" | "upgrade" if self._is_alive(worker):
                self._suspect(worker, event.verb)
            case "restart" | "upgrade" if worker.phase in (WorkerPhase.DEAD, WorkerPhase.QUARANTINED):
                worker.early_deaths = []
                self._spawn(worker, keep_pool=False)
            case _:
                pass

    def _drain(self, worker: Worker) -> None:
        """Move everything away; with nowhere to move to, what runs finishes here."""
        heirs = self._heirs(worker)
        self._become(worker, WorkerPhase.DRAINING, "")
        self._heir_leaves(worker)
        if self._serving():
            self._move_all(worker, "drain", {req: heirs.get(req, -1) for req in worker.requests})
        self._moved_away(worker)

    def _renew(self, worker: Worker, verb: str) -> None:
        """Replace its process. What has sealed pages moves away first if it can; for the rest this is a death."""
        heirs = rebalancing.with_room(self.state, self._heirs(worker))
        if not heirs and not self._are_moving(worker):
            self._suspect(worker, verb)
            return
        self._become(worker, WorkerPhase.DRAINING, verb)
        worker.renewal = verb
        self._heir_leaves(worker)
        self._move_all(worker, verb, heirs)
        self._moved_away(worker)

    def _rebalance(self, newcomer: Worker) -> None:
        """A worker is back: what decodes faster there moves to it. The other strategies are kept as published.

        Only once it has done a few steps with what is new: no stream that runs elsewhere is to find out what is wrong
        with a newborn.
        """
        if self.state.config.routing != "cost" or newcomer.phase not in SERVING:
            return
        others = [worker for worker in self._serving() if worker.id != newcomer.id]
        moves = rebalancing.moves(self.state, newcomer, others)
        for worker in others:
            heirs = {request.req: newcomer.id for request in moves if request.worker == worker.id}
            self._move_all(worker, "rebalance", heirs)

    def _heirs(self, worker: Worker) -> dict[int, int]:
        """To whom what has sealed pages would go if its worker had died: planned and unplanned moves share one rule."""
        saved = [self.state.requests[req] for req in worker.requests if self.state.num_sealed(req)]
        others = [other for other in self._serving() if other.id != worker.id]
        if not saved or not others:
            return {}
        case = recovery.Case(self.state, worker, others, can_reattach=False)
        ways = recovery.ROUTINGS[self.state.config.routing](case, [e.Interrupted(r.req, r.tokens, 0) for r in saved])
        return {req: way.heir for req, way in ways.items() if way.way == "restore"}

    def _move_all(self, worker: Worker, cause: str, heirs: dict[int, int]) -> None:
        """Have these requests move, each to its heir (-1: to be found when it has left); some may be on their way."""
        heirs = {req: heir for req, heir in heirs.items() if not self.state.requests[req].is_moving}
        if not heirs:
            return
        ways = tuple((req, "migrate", heir) for req, heir in heirs.items())
        self._out.append(c.Planned(worker.id, worker.incarnation, cause, self.state.config.recovery, ways))
        for req, heir in heirs.items():
            self._move(self.state.requests[req], heir)

    def _move(self, request: Request, heir: int) -> None:
        """Its pages go ahead to the heir while it still decodes; without pages it goes at once.

        It follows when its next page is sealed too: then the heir has but a token or two to prefill, and not most of a
        page, for which all its residents would wait.
        """
        checkpoint = self.state.arena.checkpoints.get(request.req)
        if heir < 0 or checkpoint is None or request.phase != RequestPhase.RUNNING:
            self._move_out(request)
            return
        request.heir = heir
        self._restore_begins(self.state.workers[heir], request)
        sealed = tuple(checkpoint.slots[: checkpoint.sealed])
        self._out.append(c.PreRestore(heir, request.req, request.epoch, sealed))

    def _move_out(self, request: Request) -> None:
        request.phase, request.follows = RequestPhase.MOVING, False
        self._out.append(c.MoveOut(request.worker, request.req, request.epoch))

    def _restored(self, event: e.RestoreDone) -> None:
        """An heir has the pages. If they were sent ahead, the request follows: now, if no page will be sealed soon."""
        self.checkpoints.restored(event)
        request = self.state.requests.get(event.req)
        if request is None or (request.heir, request.epoch) != (event.worker, event.epoch):
            return
        if request.phase != RequestPhase.RUNNING:
            return
        if not event.pages:
            request.heir = -1
            self._lost_heir(request)
        elif self.state.workers[request.worker].is_held_back or not self.checkpoints.is_sealing(request):
            self._move_out(request)
        else:
            request.follows = True
            self._out.append(c.SetTimer(f"follow:{request.req}", event.now + FOLLOW_S))

    def _sealed(self, event: e.PagesSealed) -> None:
        self.checkpoints.sealed(event)
        for req, epoch, _ in event.sealed:
            request = self.state.requests.get(req)
            if request is not None and request.follows and (request.worker, request.epoch) == (event.worker, epoch):
                self._move_out(request)

    def _leave_heir(self, request: Request) -> None:
        """What an heir has loaded ahead is not wanted any more."""
        if request.heir >= 0:
            heir = self.state.workers[request.heir]
            self.checkpoints.restore_ends(heir, request.req)
            self._out.append(c.Cancel(heir.id, request.req, request.epoch))
            request.heir, request.follows = -1, False

    def _heir_died(self, worker: Worker) -> None:
        """Requests whose pages went ahead to it go without, or not at all."""
        for request in [r for r in self.state.requests.values() if r.heir == worker.id]:
            request.heir, request.follows = -1, False
            if request.phase == RequestPhase.RUNNING:
                self._lost_heir(request)

    def _heir_leaves(self, worker: Worker) -> None:
        """The same for one that lives on, but takes no requests any more."""
        for request in [r for r in self.state.requests.values() if r.heir == worker.id]:
            self._leave_heir(request)
            if request.phase == RequestPhase.RUNNING:
                self._lost_heir(request)

    def _lost_heir(self, request: Request) -> None:
        """A drain moves it all the same; else it is best off where it is."""
        source = self.state.workers[request.worker]
        if source.phase == WorkerPhase.DRAINING and not source.renewal:
            self._move_out(request)
        else:
            self._out.append(c.Stays(request.req))
            self._moved_away(source)

    def _moved_away(self, worker: Worker) -> None:
        """If what was to leave it has left, it is drained, or its process is replaced."""
        if worker.phase != WorkerPhase.DRAINING:
            return
        if not worker.renewal:
            if not worker.requests:
                self._become(worker, WorkerPhase.DRAINED, "")
        elif not self._are_moving(worker):
            self._suspect(worker, worker.renewal)

    def _are_moving(self, worker: Worker) -> bool:
        """Whether a request is about to leave it."""
        return any(self.state.requests[req].is_moving for req in worker.requests)

    # -- helpers -------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that no worker has begun with."""
        return len(self.state.held) + self.state.num_backlog

    def _serving(self) -> list[Worker]:
        """Kept until a worker's phase changes: every arrival and every step asks."""
        if self._ready_workers is None:
            self._ready_workers = [w for w in self.state.workers.values() if w.phase in SERVING]
        return self._ready_workers

    def _tell(self, command: AnyCommand) -> None:
        self._out.append(command)

    def _become(self, worker: Worker, phase: WorkerPhase, why: str) -> None:
        assert phase in TRANSITIONS[worker.phase], f"worker {worker.id}: {worker.phase} → {phase} ({why})"
        worker.phase = phase
        self._ready_workers = None
        self._out.append(c.Changed(worker.id, phase.value, why))

    def check(self) -> None:
        """Assert that each request is in exactly one place and that loads are the sums of their parts."""
        owned = [req for w in self.state.workers.values() for req in w.requests]
        assert len(owned) == len(set(owned)), "a request with two owners"
        for request in self.state.requests.values():
            assert (request.worker >= 0) == (request.phase != RequestPhase.HELD)
            assert request.worker < 0 or request.req in self.state.workers[request.worker].requests
        assert set(owned) <= set(self.state.requests), "a worker owns what has ended"
        assert set(self.state.held) == {r.req for r in self.state.requests.values() if r.phase == RequestPhase.HELD}
        assert self.state.num_backlog == sum(len(w.backlog) for w in self.state.workers.values())
        self.checkpoints.check()
        for worker in self.state.workers.values():
            assert worker.backlog_tokens == sum(worker.backlog.values())
            assert set(worker.backlog) <= set(worker.requests)
            self._check_owner(worker, (self.state.requests[req] for req in worker.requests))

    def _check_owner(self, worker: Worker, requests: Iterable[Request]) -> None:
        if worker.phase in (WorkerPhase.DEAD, WorkerPhase.QUARANTINED, WorkerPhase.STOPPED):
            assert not list(requests), "a request assigned to the dead"
        for request in requests:
            assert (request.phase == RequestPhase.RETURNING) <= (
                worker.phase in (WorkerPhase.LOADING, WorkerPhase.SUSPECT, WorkerPhase.READY, WorkerPhase.DRAINING)
            )


def _keeps_pool(event: e.Settled, delay: float | None) -> bool:
    """Whether the next incarnation may continue on the dead one's KV pool."""
    return delay == 0 and not event.device_lost and not event.own_making
