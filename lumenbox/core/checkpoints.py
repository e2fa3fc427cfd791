"""The arena's accounts: which request may write its KV pages to which slots, on whose budget, and what is sealed.

A slot is free, reserved by one request, or unquiet (dropped, and its writer has not acknowledged it yet); it counts on
a holder's budget until it is free again. `machine` calls in here as requests begin, grow, move and end.
"""

from __future__ import annotations

from collections.abc import Callable

from lumenbox.core import commands as c
from lumenbox.core import events as e
from lumenbox.core import eviction, placement
from lumenbox.core.state import Arena, CoreState, KvCheckpoint, Request, RequestPhase, Unquiet, Worker, WorkerPhase

BANDWIDTH_WEIGHT = 0.2
HOLD_S = 5.0
"""No worker's writing is held back for longer: a restore may have to wait for pages or a seat."""
WITHOUT_WRITER = (WorkerPhase.DEAD, WorkerPhase.QUARANTINED, WorkerPhase.STOPPED)


class Checkpoints:
    """Keeps `state.arena` and the workers' budgets; tells what to do through `emit`; `alive` may hold."""

    def __init__(
        self, state: CoreState, emit: Callable[[c.AnyCommand], None], alive: Callable[[], list[Worker]]
    ) -> None:
        self._state = state
        self._arena: Arena = state.arena
        self._emit = emit
        self._alive = alive
        config = state.config
        self._budget = config.checkpoints.budget_pages
        self.are_on = self._budget > 0 and config.placement != "none"

    # -- growing -------------------------------------------------------------------------------------------------

    def begins(self, request: Request, now: float) -> None:
        """Its worker starts to prefill it: slots for all whole pages that it has tokens for, and one ahead."""
        self._grow(request, request.tokens // self._state.config.page_size + 1, now)

    def crossed(self, request: Request, pages: int, now: float) -> None:
        """KV exists for that many whole pages."""
        request.pages = pages
        self._grow(request, pages + 1, now)

    def _grow(self, request: Request, pages: int, now: float) -> None:
        """Reserve slots until there are `pages`, as far as they can be filled one day and the budgets allow."""
        if not self.are_on:
            return
        pages = min(pages, (request.limit - 1) // self._state.config.page_size)
        checkpoint = self._arena.checkpoints.get(request.req)
        if checkpoint is None:
            if pages > 0 and (request.worker, request.req, request.epoch) not in self._arena.unquiet:
                self._open(request, pages, now)
        elif pages > len(checkpoint.slots):
            self._reserve(request, checkpoint, pages, now)

    def _open(self, request: Request, pages: int, now: float) -> None:
        holders = placement.choose_holders(self._state, self._alive(), request.worker)
        if holders:
            self._reserve(request, KvCheckpoint(holders, now), pages, now)

    def _reserve(self, request: Request, checkpoint: KvCheckpoint, pages: int, now: float) -> None:
        first = len(checkpoint.slots)
        count = self._room(request, checkpoint, pages - first, now)
        if count <= 0:
            return
        if first == 0:
            self._arena.checkpoints[request.req] = checkpoint
            for holder in checkpoint.holders:
                self._state.workers[holder].holds[request.req] = True
        replicas = len(checkpoint.holders)
        taken = self._take(count * replicas)
        fresh = tuple(zip(*[taken[place::replicas] for place in range(replicas)], strict=True))
        checkpoint.slots += fresh
        checkpoint.grown_at = now
        for holder in checkpoint.holders:
            self._state.workers[holder].held_pages += count
        self._emit(c.ReserveSlots(request.worker, request.req, request.epoch, first, fresh))

    def _take(self, count: int) -> list[int]:
        """Free slots; there are as many wherever budgets have room."""
        arena = self._arena
        taken = arena.free[-count:]
        del arena.free[-count:]
        fresh = range(arena.fresh, arena.fresh + count - len(taken))
        arena.fresh = fresh.stop
        return [*taken, *fresh]

    # -- room on the budgets -------------------------------------------------------------------------------------

    def _room(self, request: Request, checkpoint: KvCheckpoint, wanted: int, now: float) -> int:
        """How many of the pages that it wants it gets now: on its holders' budgets, else on others', else evicting."""
        if self._room_left(checkpoint) >= wanted:
            return wanted
        for position, holder in enumerate(checkpoint.holders):
            full = self._budget - self._state.workers[holder].held_pages < wanted
            if full and not self._rehold(request, checkpoint, position, wanted):
                self._evict_for(request, checkpoint, holder, wanted, now)
        return min(wanted, self._room_left(checkpoint))

    def _room_left(self, checkpoint: KvCheckpoint) -> int:
        """Pages that fit on the budget of each of its holders."""
        workers = self._state.workers
        return self._budget - max([workers[holder].held_pages for holder in checkpoint.holders])

    def _rehold(self, request: Request, checkpoint: KvCheckpoint, position: int, wanted: int = 0) -> bool:
        """Put one replica on another holder's budget, if there is one with room for all of it."""
        others = [holder for place, holder in enumerate(checkpoint.holders) if place != position]
        size = len(checkpoint.slots)
        old = self._state.workers[checkpoint.holders[position]]
        chosen = placement.one_more(self._state, self._alive(), request.worker, others, room=size + wanted)
        if chosen is None or chosen in (old.id, request.worker):
            return False
        new = self._state.workers[chosen]
        if new.held_pages + size + wanted > self._budget:
            return False
        checkpoint.holders = (*checkpoint.holders[:position], chosen, *checkpoint.holders[position + 1 :])
        if size:
            del old.holds[request.req]
            new.holds[request.req] = True
        old.held_pages -= size
        new.held_pages += size
        return True

    def _evict_for(self, request: Request, checkpoint: KvCheckpoint, holder: int, wanted: int, now: float) -> None:
        """Evict until, once the writers are quiet, there is room: it is taken when the request grows next."""
        worker = self._state.workers[holder]
        asking = KvCheckpoint(checkpoint.holders, now, sealed=checkpoint.sealed)
        while not request.evicted and worker.held_pages - worker.unquiet_pages + wanted > self._budget:
            req = eviction.victim(self._state, holder, request, asking)
            if req is None:
                return
            self._evict(self._state.requests[req])

    def _evict(self, request: Request) -> None:
        request.evicted = True
        self._arena.evictions += 1
        gone = self._arena.checkpoints[request.req]
        self._emit(c.DropSlots(request.worker, request.req, request.epoch, gone.holders, len(gone.slots)))
        self._drop(request, 0)

    # -- shrinking -----------------------------------------------------------------------------------------------

    def ended(self, request: Request) -> None:
        """It needs nothing any more."""
        if request.req in self._arena.checkpoints:
            self._drop(request, 0)

    def leaves(self, request: Request) -> None:
        """Its worker, which is alive, lets go of it: what is not sealed may still be written to, and is given up."""
        checkpoint = self._arena.checkpoints.get(request.req)
        if checkpoint is not None and checkpoint.sealed < len(checkpoint.slots):
            self._drop(request, checkpoint.sealed)

    def _drop(self, request: Request, keep: int) -> None:
        """Give up all slots but the first `keep`; they are free once their writer is quiet, or at once without one."""
        checkpoint = self._arena.checkpoints[request.req]
        dropped = checkpoint.slots[keep:]
        del checkpoint.slots[keep:]
        if keep == 0:
            del self._arena.checkpoints[request.req]
            for holder in checkpoint.holders:
                del self._state.workers[holder].holds[request.req]
        writer = request.worker
        gone = Unquiet(checkpoint.holders, dropped)
        for holder in gone.holders:
            self._state.workers[holder].unquiet_pages += len(dropped)
        if writer < 0 or self._state.workers[writer].phase in WITHOUT_WRITER:
            self._recycle(gone)
        else:
            assert (writer, request.req, request.epoch) not in self._arena.unquiet
            self._arena.unquiet[writer, request.req, request.epoch] = gone

    def _recycle(self, gone: Unquiet) -> None:
        for slots in gone.slots:
            self._arena.free.extend(slots)
        for holder in gone.holders:
            worker = self._state.workers[holder]
            worker.held_pages -= len(gone.slots)
            worker.unquiet_pages -= len(gone.slots)

    # -- what workers tell ---------------------------------------------------------------------------------------

    def sealed(self, event: e.PagesSealed) -> None:
        """Pages became whole; words of former epochs are about slots that are nobody's or another's now."""
        for req, epoch, count in event.sealed:
            request, checkpoint = self._state.requests.get(req), self._arena.checkpoints.get(req)
            if request is None or checkpoint is None or (request.epoch, request.worker) != (epoch, event.worker):
                continue
            checkpoint.sealed = max(checkpoint.sealed, min(count, len(checkpoint.slots)))

    def quiet(self, event: e.SlotsQuiet) -> None:
        """The writer of dropped slots is done with them."""
        gone = self._arena.unquiet.pop((event.worker, event.req, event.epoch), None)
        if gone is not None:
            self._recycle(gone)

    def died(self, worker: Worker) -> None:
        """Its process writes no more, and it loads nothing."""
        for key in [key for key in self._arena.unquiet if key[0] == worker.id]:
            self._recycle(self._arena.unquiet.pop(key))
        worker.restoring, worker.is_held_back = {}, False

    def born(self, worker: Worker) -> None:
        """What was dropped while it had no socket is told again, so that it acknowledges."""
        for number, req, epoch in self._arena.unquiet:
            if number == worker.id:
                self._emit(c.DropSlots(number, req, epoch))

    def restored(self, event: e.RestoreDone) -> None:
        """Learn the bandwidth; pages behind a bad one are not sealed any more, their worker writes them anew."""
        arena, worker = self._arena, self._state.workers[event.worker]
        if event.seconds > 0 and event.bytes:
            seen, known = event.bytes / event.seconds, self._state.restore_bytes_s
            arena.bandwidth_bytes_s = known + BANDWIDTH_WEIGHT * (seen - known) if arena.bandwidth_bytes_s else seen
        if worker.restoring.get(event.req) != event.epoch:
            return
        self.restore_ends(worker, event.req)
        request, checkpoint = self._state.requests.get(event.req), arena.checkpoints.get(event.req)
        if request and checkpoint and (request.epoch, request.worker) == (event.epoch, event.worker):
            request.pages = checkpoint.sealed = min(checkpoint.sealed, event.pages)

    # -- restores and the link -----------------------------------------------------------------------------------

    def restore_begins(self, worker: Worker, request: Request, now: float) -> None:
        """While it loads pages, it writes none: both directions at once halve the one that matters."""
        if not worker.restoring:
            worker.is_held_back = True
            self._emit(c.SetSealRate(worker.id, 0.0))
            self._emit(c.SetTimer(f"seal:{worker.id}", now + HOLD_S))
        worker.restoring[request.req] = request.epoch

    def restore_ends(self, worker: Worker, req: int) -> None:
        """The pages are there, or not wanted any more."""
        if worker.restoring.pop(req, None) is not None and not worker.restoring:
            self.seals_again(worker)

    def seals_again(self, worker: Worker) -> None:
        """Nothing is loaded there any more, or it has waited long for pages or seats, and its residents with it."""
        if worker.is_held_back:
            worker.is_held_back = False
            self._emit(c.SetSealRate(worker.id, -1.0))

    # -- holders -------------------------------------------------------------------------------------------------

    def moved(self, request: Request) -> None:
        """It has a new worker, which may not be its own holder where another can be."""
        checkpoint = self._arena.checkpoints.get(request.req)
        if checkpoint is not None:
            config = self._state.config.checkpoints
            apart = placement.domain(config, request.worker)
            for position, holder in enumerate(checkpoint.holders):
                if placement.domain(config, holder) == apart:
                    self._rehold(request, checkpoint, position)

    def holder_died(self, worker: Worker) -> None:
        """Its pages go to other budgets where there is room; else they stay on that of the slot: no byte is lost."""
        for req in list(worker.holds):
            checkpoint = self._arena.checkpoints[req]
            self._rehold(self._state.requests[req], checkpoint, checkpoint.holders.index(worker.id))

    # -- what it looks like --------------------------------------------------------------------------------------

    def is_sealing(self, request: Request) -> bool:
        """Whether it has a slot for a page that is not sealed yet."""
        checkpoint = self._arena.checkpoints.get(request.req)
        return checkpoint is not None and checkpoint.sealed < len(checkpoint.slots)

    def check(self) -> None:
        """Assert that each slot is in one place, that budgets are kept and that the counts are sums."""
        arena, workers = self._arena, self._state.workers
        parts = [(cp.holders, cp.slots) for cp in arena.checkpoints.values()]
        waiting = [(gone.holders, gone.slots) for gone in arena.unquiet.values()]
        used = [slot for _, pages in parts + waiting for page in pages for slot in page]
        assert sorted([*arena.free, *used]) == list(range(arena.fresh)), "a slot is lost or owned twice"
        assert arena.fresh <= self._budget * len(workers)
        for worker in workers.values():
            held = sum(len(pages) for holders, pages in parts if worker.id in holders)
            unquiet = sum(len(pages) for holders, pages in waiting if worker.id in holders)
            assert (worker.held_pages, worker.unquiet_pages) == (held + unquiet, unquiet)
            assert worker.held_pages <= max(0, self._budget), "a budget is exceeded"
            assert worker.is_held_back <= bool(worker.restoring)
            assert set(worker.holds) == {r for r, cp in arena.checkpoints.items() if worker.id in cp.holders}
        for req, checkpoint in arena.checkpoints.items():
            self._check_one(self._state.requests[req], checkpoint)

    def _check_one(self, request: Request, checkpoint: KvCheckpoint) -> None:
        assert 0 <= checkpoint.sealed <= len(checkpoint.slots) > 0
        assert all(len(page) == len(checkpoint.holders) for page in checkpoint.slots)
        config = self._state.config.checkpoints
        domains = [placement.domain(config, holder) for holder in checkpoint.holders]
        assert len(set(domains)) == len(domains), "replicas that fail together"
        if request.worker >= 0 and request.phase != RequestPhase.HELD:
            restoring = self._state.workers[request.worker].restoring.get(request.req)
            assert restoring in (None, request.epoch)
