"""Continuous batching: which tokens of which requests one engine step computes.

Pure; the real worker and the simulated one run the same `BatchScheduler`. One step is

    plan() -> Batch, the engine computes it, commit(batch, sampled) -> Report, the frame is sent, sent()

and only `sent` lets pages that the step gave back be reused (DESIGN §2.2).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from lumenbox.core.pages import PageHash, PagePool, page_hashes
from lumenbox.core.requests import Sampled, SamplingParams

OVERTAKES = 32
"""How many younger requests may be admitted past one that waits for more pages, before it bars the way."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its worker. `tokens` is prompt + generated; KV exists for the first `num_computed` of them.

    `page_table[i]` is the pool page that holds positions [i * page_size, (i + 1) * page_size). `hashes[i]` is the
    chain hash of page i, known for whole pages only.
    """

    rid: int
    epoch: int
    params: SamplingParams
    tokens: list[int]
    num_prompt: int
    page_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    priority: int = 0
    hashes: list[PageHash] = field(default_factory=list)
    overtaken: int = 0
    slots: list[tuple[int, ...]] = field(default_factory=list)
    """Arena slots reserved for its first pages, one per replica."""
    num_sealing: int = 0
    """Pages that are sealed or on their way to be."""
    crcs: list[int] = field(default_factory=list)
    """Checksums of the sealed pages to load before it starts; empty once that is done, or never was to be."""
    is_loaded: bool = False
    """Its sealed pages are in the prefix cache, and it is to start before others take them away."""

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_missing(self) -> int:
        """Tokens whose KV is still to be computed; 1 for a sequence that decodes."""
        return len(self.tokens) - self.num_computed


@dataclass(slots=True, frozen=True)
class Chunk:
    """Positions [start, start + length) of one sequence in a step; `samples` if its last row draws the next token."""

    seq: Sequence
    start: int
    length: int

    @property
    def samples(self) -> bool:
        return self.start + self.length == len(self.seq.tokens)


@dataclass(slots=True, frozen=True)
class Batch:
    """One step: decodes (length 1, sampling) first, then prefill chunks. Never empty."""

    chunks: list[Chunk]

    @property
    def decodes(self) -> int:
        return sum(1 for chunk in self.chunks if chunk.length == 1)

    @property
    def prefill_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks if chunk.length > 1)

    @property
    def context_tokens(self) -> int:
        """KV positions that the step's decodes read."""
        return sum(chunk.start + 1 for chunk in self.chunks if chunk.length == 1)


@dataclass(slots=True)
class Report:
    """What changed since the last frame, in the terms of the wire (wire.frames.Step); empty lists where nothing did."""

    admitted: list[tuple[int, int, int]] = field(default_factory=list)
    """(rid, epoch, tokens found in the prefix cache)"""
    tokens: list[tuple[int, int, list[Sampled]]] = field(default_factory=list)
    progress: list[tuple[int, int]] = field(default_factory=list)
    """(rid, num_computed) of prefill chunks that drew no token"""
    taken: list[tuple[int, list[int]]] = field(default_factory=list)
    """pages appended to a request's table"""
    hashed: list[tuple[int, PageHash]] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    finished: list[tuple[int, int, str]] = field(default_factory=list)
    dropped: list[tuple[int, int]] = field(default_factory=list)
    """(rid, epoch) of requests that were cancelled or moved out"""
    replaced: list[tuple[int, int, int]] = field(default_factory=list)
    """(rid, index in its table, new page): half-filled pages that a re-attach copied"""


@dataclass(slots=True, frozen=True)
class Restore:
    """Sealed pages on their way from the arena to `pages`; they come behind the `cached` ones, which the pool has."""

    seq: Sequence
    cached: list[int]
    pages: list[int]

    @property
    def first(self) -> int:
        """Index of `pages[0]` in the request's table."""
        return len(self.cached)


class BatchScheduler:
    """Decodes first, then prefill chunks within a token budget, then admission by pages."""

    def __init__(
        self, num_pages: int, page_size: int, max_num_seqs: int, token_budget: int, max_model_len: int
    ) -> None:
        self.page_size = page_size
        self.max_num_seqs = max_num_seqs
        self.token_budget = token_budget
        self.max_model_len = max_model_len
        self.pool = PagePool(num_pages)
        self.running: dict[int, Sequence] = {}
        """By rid, oldest admission first."""
        self.waiting: deque[Sequence] = deque()
        self._computing: Counter[PageHash] = Counter()
        """Prompt pages that running sequences are about to compute: twins wait for them instead of doing it again."""
        self._report = Report()
        self._pinned: Counter[int] = Counter()
        """Pages that are being copied to the arena, or loaded from it."""

    # -- requests come and go ------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue a request behind those of its priority (lower goes first) that wait."""
        page_hashes(seq.tokens, self.page_size, seq.hashes)
        place = len(self.waiting)
        while place and self.waiting[place - 1].priority > seq.priority:
            place -= 1
        self.waiting.insert(place, seq)

    def adopt(self, seqs: list[Sequence], hashed: list[tuple[int, PageHash]]) -> list[tuple[int, int, int]]:
        """Continue on the pool of a former incarnation: `seqs` bring page tables and num_computed along.

        Returns the (source, target, tokens) page copies to make before the next step: what a dying device may still
        write to, the half-filled last pages, is left behind.
        """
        self.pool.adopt(hashed, [seq.page_table for seq in seqs])
        copies: list[tuple[int, int, int]] = []
        for seq in seqs:
            page_hashes(seq.tokens, self.page_size, seq.hashes)
            self._start(seq, cached=seq.num_computed)
            filled = seq.num_computed % self.page_size
            if filled and (fresh := self.pool.take(1)):
                index = seq.num_computed // self.page_size
                copies.append((seq.page_table[index], fresh[0], filled))
                self.pool.give_back([seq.page_table[index]])
                seq.page_table[index] = fresh[0]
                self._report.replaced.append((seq.rid, index, fresh[0]))
        return copies

    # -- KV checkpoints ------------------------------------------------------------------------------------------

    def take_sealable(self, limit: int) -> list[tuple[Sequence, int, int]]:
        """(request, page index, page) of whole pages that have a slot and no copy yet, at most `limit`; pins them."""
        found: list[tuple[Sequence, int, int]] = []
        for seq in self.running.values():
            last = min(seq.num_computed // self.page_size, len(seq.slots), seq.num_sealing + limit - len(found))
            found += [(seq, index, seq.page_table[index]) for index in range(seq.num_sealing, last)]
            seq.num_sealing = max(seq.num_sealing, last)
        self.pool.share(page for _, _, page in found)
        self._pinned.update(page for _, _, page in found)
        return found

    def unpin(self, pages: Iterable[int]) -> None:
        """Their copies are done or given up."""
        for page in pages:
            self._pinned[page] -= 1
            self.pool.give_back([page])
        self._pinned = +self._pinned

    def next_restore(self) -> Sequence | None:
        """The waiting request with the fewest sealed pages to load; None while it would only wait with them for a seat.

        Until it starts, its pages are prefix cache that others may evict. One that has been overtaken so often that
        nobody may start before it goes first, or nobody would ever start.
        """
        barring = next((seq for seq in self.waiting if seq.crcs and seq.overtaken >= OVERTAKES), None)
        if barring is not None and len(self.running) < self.max_num_seqs:
            return barring
        if len(self.running) + sum(seq.is_loaded for seq in self.waiting) >= self.max_num_seqs:
            return None
        return min((s for s in self.waiting if s.crcs), key=lambda s: (len(s.crcs), s.rid), default=None)

    def begin_restore(self, seq: Sequence) -> Restore | None:
        """Take pages for what the prefix cache does not hold; None when they are not free yet (try after a frame).

        All of them are kept until `end_restore`, however many steps later that is.
        """
        page_hashes(seq.tokens, self.page_size, seq.hashes)
        cached = self.pool.lookup(seq.hashes[: len(seq.crcs)])
        missing = len(seq.crcs) - len(cached)
        pages = self.pool.take(missing)
        if pages is None:
            self.pool.evict_until(missing)
            return None
        self.pool.share(cached)
        self._pinned.update([*cached, *pages])
        return Restore(seq, cached, pages)

    def restore_may_come(self, seq: Sequence) -> bool:
        """Whether frames can free the pages that `begin_restore` did not get, without anything having to end."""
        missing = len(seq.crcs) - len(self.pool.lookup(seq.hashes[: len(seq.crcs)]))
        return missing <= self.pool.num_reachable

    def end_restore(self, restore: Restore, good: int) -> int:
        """Keep the first `good` loaded pages as prefix cache, which the request then starts from; returns how many of
        its pages are there."""
        seq, first = restore.seq, restore.first
        for page, page_hash in zip(restore.pages[:good], seq.hashes[first:], strict=False):
            self.pool.seal(page, page_hash)
        self.unpin([*reversed(restore.pages), *reversed(restore.cached)])
        if good < len(restore.pages):
            seq.num_sealing = first + good
        seq.crcs, seq.is_loaded = [], True
        return first + good

    def drop(self, rid: int, epoch: int) -> bool:
        """Forget a request (cancelled, or moved out); False if it is not here under that epoch."""
        seq = self.find(rid, epoch)
        if seq is None:
            return False
        if rid in self.running:
            self._stop(seq)
            self._untell(rid)
        else:
            self.waiting.remove(seq)
        self._report.dropped.append((rid, epoch))
        return True

    def find(self, rid: int, epoch: int) -> Sequence | None:
        """The request, if it is here under that epoch."""
        seq = self.running.get(rid) or next((s for s in self.waiting if s.rid == rid), None)
        return seq if seq is not None and seq.epoch == epoch else None

    def _untell(self, rid: int) -> None:
        """A frame tells of drops before admissions: one that was adopted since the last frame never came here."""
        report = self._report
        report.admitted = [told for told in report.admitted if told[0] != rid]
        report.taken = [told for told in report.taken if told[0] != rid]
        report.replaced = [told for told in report.replaced if told[0] != rid]

    # -- one step ------------------------------------------------------------------------------------------------

    def plan(self, prefill_limit: int | None = None) -> Batch | None:
        """Choose the next step's chunks and take their pages; None when nothing can run now.

        `prefill_limit` tightens the token budget for prefill beside running decodes, to keep ITL in hand.
        """
        chunks = self._plan_decodes()
        budget = self.token_budget - len(chunks)
        if chunks and prefill_limit is not None:
            budget = min(budget, prefill_limit)
        if not self._report.preempted:
            self._admit(budget)
        chunks += self._plan_prefills(budget)
        self.pool.evict_until(self._reserve)
        return Batch(chunks) if chunks else None

    def commit(self, batch: Batch, sampled: list[Sampled]) -> None:
        """Enter what the engine computed; `sampled` aligns with the chunks that sample."""
        draws = iter(sampled)
        for chunk in batch.chunks:
            seq = chunk.seq
            seq.num_computed = chunk.start + chunk.length
            draws_token = chunk.samples
            if draws_token:
                self._append(seq, next(draws))
            else:
                self._report.progress.append((seq.rid, seq.num_computed))
            self._seal(seq, chunk.start)
            if draws_token:
                self._finish_if_done(seq)

    def report(self) -> Report:
        """Hand over what changed; the caller sends it, then calls `sent`."""
        report, self._report = self._report, Report()
        report.hashed, report.evicted = self.pool.newly_hashed, self.pool.newly_evicted
        return report

    def sent(self) -> None:
        """The frame with the last report is wholly in the socket."""
        self.pool.commit()

    @property
    def has_news(self) -> bool:
        """Whether something must be reported even if no step runs."""
        report = self._report
        return bool(self.pool.has_news or report.dropped or report.preempted or report.admitted)

    @property
    def has_dropped(self) -> bool:
        """Whether a request has left that another worker may be waiting for."""
        return bool(self._report.dropped)

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    # -- planning ------------------------------------------------------------------------------------------------

    @property
    def _reserve(self) -> int:
        """Pages to keep free ahead: eviction costs a frame, so it happens a step before the pages are needed."""
        missing = sum(s.num_missing for s in self.waiting) + sum(s.num_missing for s in self.running.values())
        prefill_pages = min(self.token_budget, missing) // self.page_size
        return min(self.pool.num_pages, len(self.running) + prefill_pages + 1)

    def _plan_decodes(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        for seq in list(self.running.values()):
            if seq.num_missing != 1 or seq.rid not in self.running:
                continue
            if self._grow(seq, 1, may_preempt=True):
                chunks.append(Chunk(seq, seq.num_computed, 1))
        return [chunk for chunk in chunks if chunk.seq.rid in self.running]

    def _plan_prefills(self, budget: int) -> list[Chunk]:
        """Share the budget evenly (what the short ones leave goes to the long), so no big prompt blocks a small one."""
        prefills = sorted((s for s in self.running.values() if s.num_missing > 1), key=lambda s: (s.num_missing, s.rid))
        chunks: list[Chunk] = []
        for position, seq in enumerate(prefills):
            length = min(seq.num_missing, budget // (len(prefills) - position))
            length = self._affordable(seq, length)
            if length > 0 and self._grow(seq, length):
                chunks.append(Chunk(seq, seq.num_computed, length))
                budget -= length
        return chunks

    def _affordable(self, seq: Sequence, length: int) -> int:
        """Cut a chunk to the pages that are free now."""
        room = (len(seq.page_table) + self.pool.num_free) * self.page_size - seq.num_computed
        return min(length, room)

    def _grow(self, seq: Sequence, length: int, may_preempt: bool = False) -> bool:
        """Give `seq` the pages for `length` more positions."""
        missing = -(-(seq.num_computed + length) // self.page_size) - len(seq.page_table)
        if missing <= 0:
            return True
        pages = self.pool.take(missing)
        if pages is None:
            if may_preempt and self.pool.num_reachable - self.pool.num_free < missing:
                self._preempt_youngest()
            return False
        seq.page_table.extend(pages)
        self._report.taken.append((seq.rid, pages))
        return True

    def _preempt_youngest(self) -> None:
        seq = next(reversed(self.running.values()))
        self._stop(seq)
        seq.page_table, seq.num_computed = [], 0
        place = next((i for i, other in enumerate(self.waiting) if other.priority >= seq.priority), len(self.waiting))
        self.waiting.insert(place, seq)
        self._report.preempted.append(seq.rid)

    def _admit(self, budget: int) -> None:
        """Start waiting requests whose pages are to be had, oldest first, none barred for ever by a big one."""
        passed: list[Sequence] = []
        for seq in list(self.waiting):
            if len(self.running) >= self.max_num_seqs or budget <= 0:
                return
            if any(older.overtaken >= OVERTAKES for older in passed):
                return
            if seq.crcs:  # its pages are still to be loaded, all at once, so that small ones could take them for ever
                passed.append(seq)
                continue
            hits = self.pool.lookup(seq.hashes[: (len(seq.tokens) - 1) // self.page_size])
            if self._twin_computes(seq, len(hits)):
                continue
            if self._fits(seq, hits):
                self.waiting.remove(seq)
                self._take_hits(seq, hits)
                budget -= min(seq.num_missing, budget)
                for older in passed:
                    older.overtaken += 1
            else:
                passed.append(seq)

    def _twin_computes(self, seq: Sequence, num_hits: int) -> bool:
        whole_pages = (len(seq.tokens) - 1) // self.page_size
        return num_hits < whole_pages and seq.hashes[num_hits] in self._computing

    def _fits(self, seq: Sequence, hits: list[int]) -> bool:
        """Pages for the whole prompt and one to grow, beside one to grow for everyone who runs."""
        wanted = len(seq.tokens) // self.page_size + 1 - len(hits)
        hits_in_cache = sum(map(self.pool.is_cached, hits))
        owed = sum(self._pages_owed(s) for s in self.running.values())
        return self.pool.num_reachable - hits_in_cache >= wanted + owed or not self.running

    def _pages_owed(self, seq: Sequence) -> int:
        return len(seq.tokens) // self.page_size + 1 - len(seq.page_table)

    def _take_hits(self, seq: Sequence, hits: list[int]) -> None:
        self.pool.share(hits)
        seq.page_table = list(hits)
        seq.num_computed = len(hits) * self.page_size
        if hits:
            self._report.taken.append((seq.rid, list(hits)))
        self._start(seq, cached=seq.num_computed)

    def _start(self, seq: Sequence, cached: int) -> None:
        self.running[seq.rid], seq.is_loaded = seq, False
        self._computing.update(seq.hashes[seq.num_computed // self.page_size :])
        self._report.admitted.append((seq.rid, seq.epoch, cached))

    # -- committing ----------------------------------------------------------------------------------------------

    def _append(self, seq: Sequence, drawn: Sampled) -> None:
        seq.tokens.append(drawn.token)
        self._report.tokens.append((seq.rid, seq.epoch, [drawn]))

    def _seal(self, seq: Sequence, start: int) -> None:
        """Publish the pages that the step made whole."""
        first, last = start // self.page_size, seq.num_computed // self.page_size
        if last > first:
            page_hashes(seq.tokens, self.page_size, seq.hashes)
        for index in range(first, last):
            self.pool.seal(seq.page_table[index], seq.hashes[index])
            self._computed(seq.hashes[index])

    def _computed(self, page_hash: PageHash) -> None:
        if self._computing[page_hash] > 1:
            self._computing[page_hash] -= 1
        else:
            del self._computing[page_hash]

    def _finish_if_done(self, seq: Sequence) -> None:
        if seq.tokens[-1] in seq.params.end_ids:
            reason = "stop"
        elif seq.num_generated >= seq.params.max_tokens or len(seq.tokens) >= self.max_model_len:
            reason = "length"
        else:
            return
        self._stop(seq)
        self._report.finished.append((seq.rid, seq.epoch, reason))

    def _stop(self, seq: Sequence) -> None:
        del self.running[seq.rid]
        for page_hash in seq.hashes[seq.num_computed // self.page_size :]:
            self._computed(page_hash)
        self.pool.give_back(reversed(seq.page_table))

    def check(self) -> None:
        """Assert the invariants that property tests and the simulator rely on."""
        self.pool.check()
        referenced = Counter(page for s in self.running.values() for page in s.page_table) + self._pinned
        assert referenced == Counter(self.pool._refs), "the pool's references are not those of the page tables"
        assert not set(self.running) & {s.rid for s in self.waiting}
        assert all(not s.page_table for s in self.waiting)
