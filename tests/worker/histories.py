"""Workers and their coordinator without processes: the real WorkerLoop, BatchScheduler, KvCheckpoints, Copier, Arena.

Engine, socket and death are fakes. A KV cell is a hash of the whole prefix that it depends on, so that a lost, foreign,
torn or too early reused page shows at once, in the pool as in the arena. What happens comes from a seed, but a copier
is a real thread with a timing of its own: the same seed may take another course.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from lumenbox.core.batching import Batch, BatchScheduler, Report, Restore
from lumenbox.core.mirror import PoolMirror
from lumenbox.core.pages import page_hashes
from lumenbox.core.requests import Sampled, SamplingParams
from lumenbox.memory.arena import Arena
from lumenbox.memory.layout import LoadReport, PageLayout
from lumenbox.memory.status import PAGE_BYTES as STATUS_BYTES
from lumenbox.memory.status import StatusWriter
from lumenbox.wire import frames, stream
from lumenbox.worker import checkpoints, loop
from lumenbox.worker.copier import Copier, Copy
from lumenbox.worker.faults import Faults

PAGE, CELL_BYTES, SLOTS = 4, 16, 200
PAGE_BYTES = PAGE * CELL_BYTES
REPORT = LoadReport((), 0, PageLayout(PAGE, PAGE_BYTES, "", ()), "", 1, "", "", True, "", 1)
ROUNDS, CALM_ROUNDS = 250, 3000
LIMIT_S = 20.0
ACTS = ["reserve"] * 4 + ["move", "send_ahead"] * 2 + ["call_off", "pace", "release", "leave", "damage"]
Key = tuple[int, int, int]
"""(worker, request, epoch)"""

from_worker = msgspec.msgpack.Decoder(frames.FromWorker).decode
to_worker = msgspec.msgpack.Decoder(frames.ToWorker).decode


def cell(prefix: list[int]) -> bytes:
    return hashlib.blake2b(bytes(prefix), digest_size=CELL_BYTES).digest()


def page_of(tokens: list[int], index: int) -> bytes:
    return b"".join(cell(tokens[: position + 1]) for position in range(index * PAGE, (index + 1) * PAGE))


def next_token(tokens: list[int]) -> int:
    return (sum(i * t for i, t in enumerate(tokens, 1)) * 7 + len(tokens)) % 17 + 3


# -- a worker --------------------------------------------------------------------------------------------------------


class Died(BaseException):
    """The process is gone: nothing in it may catch this."""


class TurnOver(BaseException):
    """The worker looks for commands."""


class Life(Faults):
    """The time of one incarnation: chance ends it at a named point of the loop, and its copier's with it."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__([], 0, 1)
        self._chance, self.risk, self.over = chance, 0.0, threading.Event()

    def at(self, point: str) -> None:
        if not point.startswith("copy_") and self._chance.random() < self.risk:
            self.over.set()
        if self.over.is_set():
            raise Died


class SlowArena(Arena):
    """Takes its time over a page, tears it if the writer dies meanwhile, and knows who may write where."""

    def __init__(self, world: World, worker: int, life: Life) -> None:
        super().__init__(world.fd, PAGE_BYTES)
        self._writers, self._worker, self._life = world.writers, worker, life
        self._chance = random.Random(world.chance.random())

    def write(self, slot: int, page: memoryview) -> int:
        os.pwrite(self._fd, page[: self._chance.randrange(len(page))], slot * PAGE_BYTES)
        if self._chance.random() < 0.3 and self._life.over.wait(self._chance.uniform(0, 0.0005)):
            raise Died
        crc = super().write(slot, page)
        assert self._writers.get(slot) == self._worker, f"worker {self._worker} writes to slot {slot} of another"
        return crc


class MortalCopier(Copier):
    """Ends with its incarnation, and keeps what it failed of for the thread that looks."""

    def __init__(self, *arguments: Any) -> None:
        self._failure: Exception | None = None
        self._gone = threading.Event()
        super().__init__(*arguments)

    def _run(self) -> None:
        self._thread = threading.current_thread()
        try:
            super()._run()
        except Died:
            pass
        except Exception as failure:  # noqa: BLE001 - `rest` raises it where somebody sees it
            self._failure = failure
        with self._change:
            self._writing, self._rate = None, 0.0  # nobody is to wait for it in vain
            self._change.notify_all()
        self._gone.set()

    def rest(self, seconds: float) -> bool:
        """Let it write what it may; whether that is done."""
        with self._change:
            rests = self._change.wait_for(lambda: not (self._waiting and self._rate) and not self._writing, seconds)
        if self._failure is not None:
            raise self._failure
        return rests

    def end(self) -> None:
        """Wake it, so that it notices that its time is over, and see it go."""
        self.set_rate(-1.0)
        self.submit(Copy(0, 0, 0, 0, ()))
        assert self._gone.wait(LIMIT_S), "the copier outlives its worker"
        self._thread.join()


class StrictScheduler(BatchScheduler):
    """Holds a restore to its word, that pages are there, and lets no page become free between two frames."""

    _were_free: set[int] | None = None

    def report(self) -> Report:
        were_free = self._were_free
        assert were_free is None or were_free.issuperset(self.pool._free), "pages are free, and no frame has told"
        return super().report()

    def sent(self) -> None:
        super().sent()
        self._were_free = set(self.pool._free)

    def end_restore(self, restore: Restore, good: int) -> int:
        pages = super().end_restore(restore, good)
        assert len(self.pool.lookup(restore.seq.hashes[:pages])) == pages, "a page went away while others were loaded"
        return pages


class FakeEngine:
    """Reads the KV of all that came before, then writes a cell a position, and may die before each. It is its pool."""

    def __init__(self, memory: bytearray, life: Life) -> None:
        self._memory, self._life = memoryview(memory), life
        self.pool, self.num_pages = self, len(memory) // PAGE_BYTES

    def page_bytes(self, page: int) -> memoryview:
        return self._memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]

    def copy_page(self, source: int, target: int, tokens: int) -> None:
        kept = self.page_bytes(source)[: tokens * CELL_BYTES]
        self.page_bytes(target)[:] = bytes(kept).ljust(PAGE_BYTES, b"\0")

    def check(self, tokens: list[int], table: list[int], computed: int) -> None:
        for position in range(computed):
            assert self._cell(table, position) == cell(tokens[: position + 1]), f"foreign KV at {position} of {table}"

    def execute(self, batch: Batch) -> list[Sampled]:
        for chunk in batch.chunks:
            self.check(chunk.seq.tokens, chunk.seq.page_table, chunk.start)
        for chunk in batch.chunks:
            for position in range(chunk.start, chunk.start + chunk.length):
                self._life.at("cell")
                self._cell(chunk.seq.page_table, position)[:] = cell(chunk.seq.tokens[: position + 1])
        return [Sampled(next_token(chunk.seq.tokens)) for chunk in batch.chunks if chunk.samples]

    def _cell(self, table: list[int], position: int) -> memoryview:
        start = position % PAGE * CELL_BYTES
        return self.page_bytes(table[position // PAGE])[start : start + CELL_BYTES]


class FakeLink:
    """A socket in which frames survive their writer, the last one perhaps torn."""

    def __init__(self, life: Life) -> None:
        self._life, self.written, self.is_blocked = life, bytearray(), False

    def write(self, data: bytes) -> None:
        self.written += data[: len(data) // 2]
        self._life.at("frame_half_written")
        self.written += data[len(data) // 2 :]

    def receive(self, *, block: bool) -> list[frames.ToWorker]:
        self.is_blocked = block
        raise TurnOver


class Worker:
    """A slot: its KV pool, and the coordinator's mirror of that, outlast its incarnations."""

    def __init__(self, world: World, number: int, num_pages: int) -> None:
        self._world, self.number, self._incarnation = world, number, 0
        self._memory, self.mirror = bytearray(num_pages * PAGE_BYTES), PoolMirror()
        self.birth([], keeps_pool=False)

    def birth(self, back: list[frames.Placed], keeps_pool: bool) -> None:
        """Begin an incarnation, on the pool of the former one if that is kept."""
        chance, memory = self._world.chance, self._memory
        if keeps_pool:
            self.mirror.keep_only({placed.rid for placed in back})
        else:
            self.mirror.clear()
            memory[:] = chance.randbytes(len(memory))
        self._incarnation += 1
        limits, hashed = frames.SchedulerLimits(self._world.seats, 16, self._world.max_len), self.mirror.hashes.items()
        boot = frames.Boot(self.number, self._incarnation, "", REPORT, limits, "", [], back, list(hashed))
        self.life, self.inbox = Life(random.Random(chance.random())), list[frames.ToWorker]()
        self.link, self._splitter = FakeLink(self.life), stream.Splitter()
        self.engine, status = FakeEngine(memory, self.life), StatusWriter(bytearray(STATUS_BYTES), 0)  # type: ignore
        arena = SlowArena(self._world, self.number, self.life)
        self.checkpoints = checkpoints.KvCheckpoints(arena, self.engine, self.life)  # type: ignore[arg-type]
        self.loop = loop.WorkerLoop(self.link, status, self.engine, boot, self.life, self.checkpoints)  # type: ignore
        self.life.risk = self._world.risk
        try:
            self.loop.adopt(to_worker(frames.encode(boot)))  # type: ignore[arg-type]
        except Died:
            pass

    @property
    def copier(self) -> MortalCopier | None:
        return self.checkpoints._copier  # type: ignore[return-value]

    def send(self, command: frames.ToWorker) -> None:
        self.inbox.append(to_worker(frames.encode(command)))

    def turn(self) -> None:
        """Once around the loop, unless it sleeps until there are commands."""
        if self.life.over.is_set() or (self.link.is_blocked and not self.inbox):
            return
        commands, self.inbox = self.inbox, []
        self.loop._step_s = 0.0  # a slice of a restore is as short as RESTORE_SLICE_S has it, not as the last step was
        try:
            self.loop.run(commands)
        except TurnOver:
            self.loop._scheduler.check()
        except Died:
            pass
        if self.copier is not None:
            self.copier.rest(0.0)

    def frames(self) -> list[frames.Step]:
        """What was sent and not yet read."""
        messages = self._splitter.feed(bytes(self.link.written))
        self.link.written.clear()
        return [from_worker(message) for message in messages]  # type: ignore[misc]

    def end(self) -> None:
        """No thread of this incarnation is left."""
        self.life.over.set()
        if self.copier is not None:
            self.copier.end()


# -- the coordinator -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Asked:
    """A request as its client and the ledger know it, and where its KV checkpoint lies."""

    rid: int
    params: SamplingParams = field(repr=False)
    tokens: list[int]
    num_prompt: int
    worker: int = -1
    epoch: int = 0
    slots: list[tuple[int, ...]] = field(default_factory=list)
    sealed: int = 0
    is_moving: bool = False
    reason: str = ""

    @property
    def key(self) -> Key:
        return self.worker, self.rid, self.epoch


class World:
    """The coordinator: asks, moves and takes away at random, and checks every byte and word that comes back."""

    def __init__(self, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.chance, self._patch = random.Random(seed), patch
        patch.setattr(checkpoints, "Copier", MortalCopier)
        patch.setattr(loop, "BatchScheduler", StrictScheduler)
        num_pages, self.seats = self.chance.choice((8, 8, 10, 14, 24)), self.chance.choice((2, 4, 8))
        self.max_len, self._replicas = num_pages * PAGE, self.chance.choice((1, 1, 2))
        self._crowd, self.risk = self.chance.choice((1, 3, 8, 8)), self.chance.choice((0, 0.002, 0.006, 0.015))
        self.fd = os.memfd_create("arena")
        os.ftruncate(self.fd, SLOTS * PAGE_BYTES)
        self._free, self.writers, self._crcs = list(range(SLOTS)), dict[int, int](), dict[int, int]()
        self._damaged, self._unquiet = set[int](), dict[Key, list[tuple[int, ...]]]()
        self._loading, self._called_off = dict[Key, int](), set[Key]()
        self._asked, self.history = list[Asked](), deque[str](maxlen=40)
        self.workers = [Worker(self, number, num_pages) for number in range(self.chance.choice((1, 2, 3)))]

    def close(self) -> None:
        """End all threads, close what is open."""
        for worker in self.workers:
            worker.end()
        os.close(self.fd)

    def run(self) -> None:
        """A wild time, a calm one until everybody has their answer, and nothing left over."""
        for _ in range(ROUNDS):
            self._round(self.chance.randint(0, 3))
        self.risk = 0
        for worker in self.workers:
            worker.life.risk = 0
            worker.send(frames.SealRate(self.chance.choice((0.0, -1.0))))  # nobody's end may wait for a copy
        for _ in range(CALM_ROUNDS):
            self._round(0)
            assert all(w.copier.rest(LIMIT_S) for w in self.workers if w.copier), "the copier stands still"
            if not self._live and all(worker.link.is_blocked and not worker.inbox for worker in self.workers):
                return self._check_rest()
        raise AssertionError(f"no rest: {self._live}")

    @property
    def _live(self) -> list[Asked]:
        return [asked for asked in self._asked if not asked.reason]

    def _round(self, acts: int) -> None:
        for _ in range(acts):
            self._act()
        for worker in self.workers:
            if self.chance.random() < 0.8:
                self._patch.setattr(checkpoints, "RESTORE_SLICE_S", self.chance.choice((0.0, 0.0, 0.0, 0.0001, 0.02)))
                worker.turn()
            if worker.life.over.is_set() or self.chance.random() < 0.7 or not acts:
                for frame in worker.frames():
                    self._commit(worker, frame)
                if not worker.inbox and not worker.life.over.is_set():
                    self._check_answered(worker)
            if worker.life.over.is_set():
                self._settle(worker)
            elif worker.copier is not None and self.chance.random() < 0.05:
                worker.copier.rest(0.001)

    # -- what the world does -----------------------------------------------------------------------------------------

    def _act(self) -> None:
        live = self._live
        if self.chance.random() < 0.15 and len(live) < self._crowd:
            prompt = [self.chance.randint(1, 2) for _ in range(self.chance.randint(1, 24))]
            params = SamplingParams(self.chance.randint(1, 18), end_ids=(7,) if self.chance.random() < 0.3 else ())
            self._asked.append(Asked(len(self._asked), params, list(prompt), len(prompt)))
            self._assign(self._asked[-1])
        elif live:
            asked, act = self.chance.choice(live), self.chance.choice(ACTS)
            loading = [asked for asked in live if asked.key in self._loading]
            if loading and self.chance.random() < 0.3:  # a load is short, and much can happen to it
                asked, act = self.chance.choice(loading), self.chance.choice(("release", "move", "leave"))
            self.history.append(f"{act} {asked}")
            getattr(self, f"_{act}")(asked, self.workers[asked.worker])

    def _reserve(self, asked: Asked, worker: Worker) -> None:
        pages = min(len(asked.tokens) + PAGE * self.chance.randint(1, 3), self.max_len) // PAGE - len(asked.slots)
        if pages > 0 and not asked.is_moving and asked.key not in self._unquiet:
            new = [tuple(self._free.pop() for _ in range(self._replicas)) for _ in range(pages)]
            self.writers |= {slot: worker.number for page in new for slot in page}
            worker.send(frames.Reserve(asked.rid, asked.epoch, len(asked.slots), new))
            asked.slots += new

    def _release(self, asked: Asked, worker: Worker) -> None:
        if asked.slots and not asked.is_moving and asked.key not in self._unquiet:
            worker.send(frames.Release(asked.rid, asked.epoch))
            self._drop(asked, 0)
            if asked.key in self._loading:
                self._loading[asked.key] = 0

    def _move(self, asked: Asked, worker: Worker) -> None:
        asked.is_moving = True
        self._cancel(asked.key)

    def _leave(self, asked: Asked, worker: Worker) -> None:
        self._cancel(asked.key)
        self._end(asked, "cancelled")

    def _send_ahead(self, asked: Asked, worker: Worker) -> None:
        heir = self.chance.choice(self.workers)
        key = (heir.number, asked.rid, asked.epoch)
        if heir is not worker and asked.sealed and key not in self._loading and key not in self._called_off:
            self._loading[key] = 0  # its slots may be another's by the time they are read
            heir.send(frames.Preload(self._placed(asked, loads=True)))

    def _call_off(self, asked: Asked, worker: Worker) -> None:
        """What was sent ahead is not wanted any more; the request itself may be there by now, under a new epoch."""
        for key in [key for key in self._loading if key[1] == asked.rid and key != asked.key]:
            self._cancel(key)

    def _pace(self, asked: Asked, worker: Worker) -> None:
        worker.send(frames.SealRate(self.chance.choice((0.0, -1.0, -1.0, -1.0, 1e6))))

    def _damage(self, asked: Asked, worker: Worker) -> None:
        """Not while it loads: what is found bad is written anew, which is told later."""
        if asked.sealed and not asked.is_moving and asked.key not in self._loading:
            slot = self.chance.choice(asked.slots[self.chance.randrange(asked.sealed)])
            if slot not in self._damaged:
                self._damaged.add(slot)
                Arena(self.fd, PAGE_BYTES).flip_byte(slot)

    def _cancel(self, key: Key) -> None:
        self.workers[key[0]].send(frames.Cancel(*key[1:]))
        if self._loading.pop(key, None) is not None:
            self._called_off.add(key)

    def _assign(self, asked: Asked) -> None:
        ahead = [self.workers[key[0]] for key in self._loading if key[1] == asked.rid]
        worker, loads = self.chance.choice(ahead or self.workers), self.chance.random() < 0.8
        asked.worker, asked.is_moving = worker.number, False
        self.writers |= {slot: worker.number for page in asked.slots for slot in page}
        if loads and asked.sealed:
            self._loading[asked.key] = asked.sealed
        worker.send(frames.Assign(self._placed(asked, loads)))
        if self.chance.random() < 0.5:
            self._call_off(asked, worker)

    def _placed(self, asked: Asked, loads: bool, **place: Any) -> frames.Placed:
        self._check_sealed(asked)
        crcs = [self._crcs[page[0]] for page in asked.slots[: asked.sealed]] if loads else []
        place |= {"slots": list(asked.slots), "sealed": asked.sealed, "crcs": crcs}
        return frames.Placed(asked.rid, asked.epoch, asked.params, list(asked.tokens), asked.num_prompt, **place)

    def _drop(self, asked: Asked, keep: int) -> None:
        """Its slots but for the first are free when their writer is quiet."""
        gone, asked.slots, asked.sealed = asked.slots[keep:], asked.slots[:keep], min(asked.sealed, keep)
        if gone:
            assert asked.key not in self._unquiet, f"slots of {asked} are dropped twice"
            self._unquiet[asked.key] = gone

    def _quiet(self, key: Key) -> None:
        for slot in (slot for page in self._unquiet.pop(key, []) for slot in page):
            self._free.append(slot)  # the next to be taken: a writer that is late meets its successor
            del self.writers[slot]

    def _end(self, asked: Asked, reason: str) -> None:
        self._drop(asked, 0)
        asked.reason = reason

    # -- what workers tell -------------------------------------------------------------------------------------------

    def _known(self, worker: Worker, rid: int, epoch: int) -> Asked | None:
        """The request, unless those are words of a former epoch, or it has ended."""
        asked = self._asked[rid]
        return asked if asked.key == (worker.number, rid, epoch) and not asked.reason else None

    def _commit(self, worker: Worker, frame: frames.Step) -> None:
        """In the order of coordinator.box, but that nobody is admitted before its pages are there."""
        worker.mirror.apply(frame)
        for rid, epoch, pages, _, _ in frame.restored:
            self._restored(worker, rid, epoch, pages)
        for rid, epoch, _ in frame.admitted:
            assert (worker.number, rid, epoch) not in self._loading, f"request {rid} did not wait for its pages"
            if (asked := self._known(worker, rid, epoch)) and self.chance.random() < 0.7:
                self._reserve(asked, worker)
        reasons = {rid: reason for rid, _, reason in frame.finished}
        for rid, epoch, drawn in frame.tokens:
            if asked := self._known(worker, rid, epoch):
                self._drawn(worker, asked, drawn, reasons.get(rid, ""))
        for rid, epoch, index, crc in frame.sealed:
            if (asked := self._known(worker, rid, epoch)) and index < len(asked.slots):
                self._sealed(asked, index, crc)
        for rid, epoch in frame.dropped:
            if (asked := self._known(worker, rid, epoch)) and asked.is_moving:
                self._drop(asked, asked.sealed)
                asked.epoch += 1
                self._assign(asked)
        for rid, epoch in (*((rid, epoch) for rid, epoch, _ in frame.finished), *frame.dropped, *frame.quiet):
            self._quiet((worker.number, rid, epoch))

    def _restored(self, worker: Worker, rid: int, epoch: int, pages: int) -> None:
        key = (worker.number, rid, epoch)
        promised = self._loading.pop(key, None)
        assert promised is not None or key in self._called_off, f"nobody asked for the pages of {key}"
        if asked := self._known(worker, rid, epoch):
            is_short = promised is not None and pages < promised
            assert not is_short or self._damaged.issuperset(asked.slots[pages]), f"sound page {pages} of {key} is lost"
            asked.sealed = min(asked.sealed, pages)

    def _drawn(self, worker: Worker, asked: Asked, drawn: list[Sampled], reason: str) -> None:
        for sampled in drawn:
            assert sampled.token == next_token(asked.tokens), f"request {asked.rid} got a wrong token"
            asked.tokens.append(sampled.token)
        worker.mirror.sampled(asked.rid, len(asked.tokens))
        is_long = len(asked.tokens) >= min(asked.num_prompt + asked.params.max_tokens, self.max_len)
        expected = "stop" if asked.tokens[-1] in asked.params.end_ids else "length" if is_long else ""
        assert reason == expected, f"not {expected!r} but {reason!r} ends {asked}"
        if reason:
            self._end(asked, reason)

    def _sealed(self, asked: Asked, index: int, crc: int) -> None:
        assert index <= asked.sealed, f"page {index} of request {asked.rid} is sealed before {asked.sealed}"
        assert crc == zlib.crc32(page_of(asked.tokens, index)), f"not the checksum of page {index} of {asked}"
        self._damaged.difference_update(asked.slots[index])
        self._crcs |= dict.fromkeys(asked.slots[index], crc)
        asked.sealed = max(asked.sealed, index + 1)
        self._check_sealed(asked, index)

    def _settle(self, worker: Worker) -> None:
        """It is dead, all its frames are read: its requests come back to its successor, or go elsewhere."""
        worker.end()
        self._check_promised(worker)
        for key in [key for key in self._unquiet if key[0] == worker.number]:
            self._quiet(key)
        self._loading = {key: pages for key, pages in self._loading.items() if key[0] != worker.number}
        keeps_pool, tables, computed = self.chance.random() < 0.7, worker.mirror.tables, worker.mirror.computed
        back, away = list[frames.Placed](), list[Asked]()
        for asked in (asked for asked in self._live if asked.worker == worker.number):
            rid, asked.epoch, asked.is_moving = asked.rid, asked.epoch + 1, False
            if keeps_pool and computed.get(rid) and self.chance.random() < 0.7:
                back.append(self._placed(asked, False, page_table=list(tables[rid]), num_computed=computed[rid]))
            else:
                away.append(asked)
        self.history.append(f"death of worker {worker.number}, back come {[placed.rid for placed in back]}")
        worker.birth(back, keeps_pool)
        for asked in away:
            self._assign(asked)

    # -- what must hold ----------------------------------------------------------------------------------------------

    def _check_sealed(self, asked: Asked, first: int = 0) -> None:
        """What frames have told to be in the arena is there, up to a page that chaos has made unreadable."""
        for index in range(first, asked.sealed):
            sound = [slot for slot in asked.slots[index] if slot not in self._damaged]
            if not sound:
                return
            stored = {os.pread(self.fd, PAGE_BYTES, slot * PAGE_BYTES) for slot in sound}
            assert stored == {page_of(asked.tokens, index)}, f"not what was sealed: page {index} of {asked}"

    def _check_promised(self, worker: Worker) -> None:
        """What frames have told to be in the pool is there, whatever its worker was doing when it died."""
        mirror = worker.mirror
        for asked in self._live:
            if asked.worker == worker.number and asked.rid in mirror.tables:
                worker.engine.check(asked.tokens, mirror.tables[asked.rid], mirror.computed[asked.rid])
        told = {page_hash: page for page, page_hash in mirror.hashes.items()}
        for asked in self._asked:
            for index, page_hash in enumerate(page_hashes(asked.tokens, PAGE)):
                page = told.pop(page_hash, None)
                assert page is None or worker.engine.page_bytes(page) == page_of(asked.tokens, index), "foreign cache"

    def _check_answered(self, worker: Worker) -> None:
        """It has obeyed all commands, and its frames are read: who is asked to let go tells of it in the same turn."""
        assert all(key[0] != worker.number for key in self._unquiet), "somebody has not let go of their slots"
        self._called_off = {key for key in self._called_off if key[0] != worker.number}
        loads = any(key[0] == worker.number for key in self._loading)
        assert not (loads and worker.link.is_blocked), "a worker sleeps over pages that it was asked for"

    def _check_rest(self) -> None:
        assert not self._loading, "pages were asked for, and no word came back"
        assert sorted(self._free) == list(range(SLOTS)), "slots are left over"
        for worker in self.workers:
            pool = worker.loop._scheduler.pool
            assert pool.num_free + pool.num_cached == pool.num_pages, "pages are left over"
            assert (worker.mirror.tables, worker.mirror.hashes) == ({}, pool._hash_of), "the mirror is wrong"
