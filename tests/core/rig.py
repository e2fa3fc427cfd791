"""A worker without an engine: the real BatchScheduler on a KV pool whose every cell says what was written there.

A cell holds the whole prefix that its KV depends on, so a lost, foreign, torn or too early reused page shows at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lumenbox.core.batching import Batch, BatchScheduler, Chunk, Report, Sequence
from lumenbox.core.mirror import PoolMirror
from lumenbox.core.pages import page_hashes
from lumenbox.core.requests import Sampled, SamplingParams

PAGE = 4
TORN = ("torn",)


def next_token(tokens: list[int]) -> int:
    """The fake model: greedy, and sensitive to every token of the prefix."""
    return (sum(i * t for i, t in enumerate(tokens, 1)) * 7 + len(tokens)) % 17 + 3


def answer(prompt: list[int], max_tokens: int, max_model_len: int, end_ids: tuple[int, ...]) -> tuple[list[int], str]:
    """The failure-free run of one request alone."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens))
        if tokens[-1] in end_ids:
            return tokens, "stop"
        if len(tokens) - len(prompt) >= max_tokens or len(tokens) >= max_model_len:
            return tokens, "length"


@dataclass
class Asked:
    """A request as its client and the ledger know it."""

    params: SamplingParams
    num_prompt: int
    tokens: list[int]
    priority: int
    epoch: int = 0
    reason: str | None = None


@dataclass
class Rig:
    """See module docstring. `mirror` and `asked` move on with each frame that is wholly sent, and with nothing else."""

    num_pages: int = 12
    max_num_seqs: int = 4
    token_budget: int = 8
    max_model_len: int = 40
    kv: dict[tuple[int, int], tuple[int, ...] | tuple[str]] = field(default_factory=dict)
    mirror: PoolMirror = field(default_factory=PoolMirror)
    asked: dict[int, Asked] = field(default_factory=dict)
    shapes: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = self._fresh()

    def _fresh(self) -> BatchScheduler:
        return BatchScheduler(self.num_pages, PAGE, self.max_num_seqs, self.token_budget, self.max_model_len)

    # -- what comes from outside ---------------------------------------------------------------------------------

    def arrive(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        priority: int = 0,
        end_ids: tuple[int, ...] = (),
        sealed: int = 0,
    ) -> int:
        """A new request; with `sealed` pages it comes from another worker."""
        rid = len(self.asked)
        params = SamplingParams(max_tokens=max_tokens, end_ids=end_ids)
        self.asked[rid] = Asked(params, len(prompt), list(prompt), priority)
        sequence = self._sequence(rid)
        sequence.crcs, sequence.num_sealing = [0] * sealed, sealed
        self.scheduler.add(sequence)
        return rid

    def restore(self) -> int | None:
        """Load the sealed pages of whose turn it is; which request that was, None if none could be loaded."""
        seq = self.scheduler.next_restore()
        restore = self.scheduler.begin_restore(seq) if seq is not None else None
        if seq is None or restore is None:
            return None
        for index, page in enumerate(restore.pages, restore.first):
            for offset in range(PAGE):
                self.kv[page, offset] = tuple(seq.tokens[: index * PAGE + offset + 1])
        self.scheduler.end_restore(restore, len(restore.pages))
        return seq.rid

    def cancel(self, rid: int) -> None:
        asked = self.asked[rid]
        if asked.reason is None:
            asked.reason = "cancelled"
            assert self.scheduler.drop(rid, asked.epoch)

    def _sequence(self, rid: int) -> Sequence:
        asked = self.asked[rid]
        return Sequence(rid, asked.epoch, asked.params, list(asked.tokens), asked.num_prompt, priority=asked.priority)

    # -- one step, in the pieces between which a worker can die --------------------------------------------------

    def plan(self, prefill_limit: int | None = None) -> Batch | None:
        batch = self.scheduler.plan(prefill_limit)
        self.scheduler.check()
        if batch is not None:
            self._check_batch(batch, prefill_limit)
        return batch

    def _check_batch(self, batch: Batch, prefill_limit: int | None) -> None:
        decoding = [chunk.seq.num_missing == 1 for chunk in batch.chunks]
        assert decoding == sorted(decoding, reverse=True), "decodes come first"
        lengths = [chunk.length for chunk in batch.chunks]
        assert min(lengths) > 0
        assert sum(lengths) <= self.token_budget
        if prefill_limit is not None and decoding[0]:
            assert sum(lengths[sum(decoding) :]) <= prefill_limit
        assert len({chunk.seq.rid for chunk in batch.chunks}) == len(batch.chunks)
        for chunk in batch.chunks:
            assert chunk.start == chunk.seq.num_computed
        self.shapes.append((sum(decoding), sum(lengths[sum(decoding) :])))

    def compute(self, batch: Batch) -> list[Sampled]:
        for chunk in batch.chunks:
            self._read(chunk.seq.tokens, chunk.seq.page_table, chunk.start)
        for chunk in batch.chunks:
            for position in self._positions(chunk):
                self.kv[self._cell(chunk.seq.page_table, position)] = tuple(chunk.seq.tokens[: position + 1])
        return [Sampled(next_token(chunk.seq.tokens)) for chunk in batch.chunks if chunk.samples]

    def send(self, report: Report) -> None:
        """The frame arrives whole: mirror, ledger, and only then `sent`."""
        self.mirror.apply(report)
        endings = {rid: reason for rid, _, reason in report.finished}
        assert len(endings) == len(report.finished)
        for rid, epoch, drawn in report.tokens:
            asked = self.asked[rid]
            assert epoch == asked.epoch
            assert asked.reason is None
            asked.tokens += [sampled.token for sampled in drawn]
            self.mirror.sampled(rid, len(asked.tokens))
            asked.reason = endings.pop(rid, None)
        assert not endings
        self.scheduler.sent()
        self.check()

    def step(self, prefill_limit: int | None = None) -> Report | None:
        """What worker.loop does in one turn; None when there was nothing to do and nothing to tell."""
        batch = self.plan(prefill_limit)
        if batch is not None:
            self.scheduler.commit(batch, self.compute(batch))
        elif not self.scheduler.has_news:
            assert self.scheduler.idle, "requests wait, nothing runs, and no frame will change that"
            return None
        report = self.scheduler.report()
        self.send(report)
        return report

    def run(self, bound: int = 2_000) -> int:
        """Step until everything has ended; the number of steps."""
        for count in range(bound):
            if self.step() is None:
                return count
        raise AssertionError(f"not idle after {bound} steps")

    # -- death and re-attach -------------------------------------------------------------------------------------

    def die(self, moment: str, stays: Iterable[int] | None = None) -> None:
        """The worker dies at a moment of its step; the next incarnation adopts what the mirror knows.

        `stays` are those that re-attach (all that can, if None); the others are computed from their tokens.
        """
        batch = self._die_in_step(moment)
        self.check_mirror_points_at_intact_bytes()
        stays = set(self.mirror.tables if stays is None else stays)
        stays = {rid for rid in stays if self.mirror.computed.get(rid) and self.asked[rid].reason is None}
        self.mirror.keep_only(stays)
        self.scheduler = self._fresh()
        for asked in self.asked.values():
            asked.epoch += asked.reason is None
        known = {page for table in self.mirror.tables.values() for page in table}
        copies = self.scheduler.adopt([self._adopted(r) for r in self.mirror.tables], list(self.mirror.hashes.items()))
        for source, target, count in copies:
            for offset in range(count):
                self.kv[target, offset] = self.kv[source, offset]
        self._tear(batch, known)  # a dying device may still write what its last step was to write
        for rid, asked in self.asked.items():
            if asked.reason is None and rid not in stays:
                self.scheduler.add(self._sequence(rid))
        self.scheduler.check()

    def _die_in_step(self, moment: str) -> Batch | None:
        if moment == "idle":
            return None
        batch = self.plan()
        if batch is None or moment == "planned":
            return batch
        self._tear(batch)
        if moment == "computing":
            return batch
        self.scheduler.commit(batch, [Sampled(next_token(c.seq.tokens)) for c in batch.chunks if c.samples])
        if moment == "reported":
            self.scheduler.report()
        return batch

    def _tear(self, batch: Batch | None, pages: Iterable[int] | None = None) -> None:
        for chunk in batch.chunks if batch else ():
            for position in self._positions(chunk):
                cell = self._cell(chunk.seq.page_table, position)
                if pages is None or cell[0] in pages:
                    self.kv[cell] = TORN

    def _adopted(self, rid: int) -> Sequence:
        seq = self._sequence(rid)
        seq.page_table, seq.num_computed = list(self.mirror.tables[rid]), self.mirror.computed[rid]
        return seq

    # -- what must always hold -----------------------------------------------------------------------------------

    def check(self) -> None:
        self.scheduler.check()
        running = self.scheduler.running
        assert self.mirror.tables == {rid: seq.page_table for rid, seq in running.items()}
        assert self.mirror.computed == {rid: seq.num_computed for rid, seq in running.items()}
        assert self.mirror.hashes == self.scheduler.pool._hash_of
        assert self.mirror.pages_cached == self.scheduler.pool.num_cached
        here = {*running, *(seq.rid for seq in self.scheduler.waiting)}
        assert here == {rid for rid, asked in self.asked.items() if asked.reason is None}
        self.check_mirror_points_at_intact_bytes()

    def check_mirror_points_at_intact_bytes(self) -> None:
        for rid, table in self.mirror.tables.items():
            self._read(self.asked[rid].tokens, table, self.mirror.computed[rid])
        for page, page_hash in self.mirror.hashes.items():
            prefix = [int(token) for token in self.kv[page, PAGE - 1]]
            assert page_hashes(prefix, PAGE)[-1] == page_hash, f"page {page} is not what its hash says"
            self._read_cells([page], prefix, range(len(prefix) - PAGE, len(prefix)), len(prefix) - PAGE)

    def check_answers(self) -> None:
        for rid, asked in self.asked.items():
            prompt, params = asked.tokens[: asked.num_prompt], asked.params
            expected = answer(prompt, params.max_tokens, self.max_model_len, params.end_ids)
            if asked.reason == "cancelled":
                assert expected[0][: len(asked.tokens)] == asked.tokens
            else:
                assert (asked.tokens, asked.reason) == expected, f"request {rid}"

    def _read(self, tokens: list[int], table: list[int], length: int) -> None:
        self._read_cells(table, tokens, range(length), 0)

    def _read_cells(self, table: list[int], tokens: list[int], positions: range, base: int) -> None:
        for position in positions:
            cell = self.kv.get(self._cell(table, position - base))
            assert cell == tuple(tokens[: position + 1]), f"position {position} of {table} holds {cell}"

    @staticmethod
    def _positions(chunk: Chunk) -> range:
        return range(chunk.start, chunk.start + chunk.length)

    @staticmethod
    def _cell(table: list[int], position: int) -> tuple[int, int]:
        return table[position // PAGE], position % PAGE
