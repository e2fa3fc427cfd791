"""`lumenbox bench restore`: how long until a context is decoding again, from sealed pages and from its tokens."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

from lumenbox.core.batching import BatchScheduler, Sequence
from lumenbox.core.requests import SamplingParams
from lumenbox.engine import loader
from lumenbox.engine.model import Engine, build
from lumenbox.memory import segment
from lumenbox.memory.arena import Arena

PAGE_SIZE = 16
BUDGET = 512


def run(model_dir: Path, contexts: tuple[int, ...], rounds: int = 3) -> dict[str, Any]:
    """Restore and recompute each context in turns; the ratio is of the medians."""
    weights: list[int] = []

    def allocate(size: int) -> int:
        weights.append(segment.create("lumenbox-weights", size))
        return weights[0]

    report = loader.load(model_dir, allocate, dtype="auto", exact="auto", page_size=PAGE_SIZE, threads=1)
    pages = 2 * max(contexts) // PAGE_SIZE + 8
    pool_fd = segment.create("lumenbox-kv", pages * report.page.page_bytes)
    arena_fd = segment.create("lumenbox-arena", pages * report.page.page_bytes)
    engine = build(report, model_dir, weights[0], pool_fd)
    arena = Arena(arena_fd, report.page.page_bytes)
    rows = [_measure(engine, arena, context, rounds) for context in contexts]
    for fd in (*weights, pool_fd, arena_fd):
        os.close(fd)
    return {"schema": 1, "dtype": report.dtype, "exact": report.exact, "rows": rows}


def _measure(engine: Engine, arena: Arena, context: int, rounds: int) -> dict[str, Any]:
    tokens = random.Random(context).choices(range(100, 400), k=context)
    recompute, restore = [], []
    for _ in range(rounds):
        seq, scheduler = _sequence(tokens), _scheduler(engine, context)
        started = time.monotonic()
        scheduler.add(seq)
        token = _first_token(engine, scheduler)
        recompute.append(time.monotonic() - started)
        whole = seq.page_table[: context // PAGE_SIZE]
        crcs = [arena.write(slot, engine.pool.page_bytes(page)) for slot, page in enumerate(whole)]
        seq, scheduler = _sequence(tokens), _scheduler(engine, context)
        seq.crcs, seq.slots = crcs, [(slot,) for slot in range(len(crcs))]
        started = time.monotonic()
        scheduler.add(seq)
        _load(engine, scheduler, arena, seq)
        again = _first_token(engine, scheduler)
        restore.append(time.monotonic() - started)
        assert token == again, "the restored context drew another token"
    slow, fast = sorted(recompute)[rounds // 2], sorted(restore)[rounds // 2]
    return {
        "context": context,
        "recompute_s": round(slow, 4),
        "restore_s": round(fast, 4),
        "ratio": round(slow / fast, 1),
        "bytes": len(crcs) * arena.page_bytes,
    }


def _scheduler(engine: Engine, context: int) -> BatchScheduler:
    return BatchScheduler(engine.pool.num_pages, PAGE_SIZE, 1, BUDGET, context + PAGE_SIZE)


def _sequence(tokens: list[int]) -> Sequence:
    return Sequence(1, 0, SamplingParams(max_tokens=2, temperature=0.0), list(tokens), len(tokens))


def _load(engine: Engine, scheduler: BatchScheduler, arena: Arena, seq: Sequence) -> None:
    restore = scheduler.begin_restore(seq)
    assert restore is not None
    for page, slots, crc in zip(restore.pages, seq.slots, seq.crcs, strict=True):
        assert arena.read(slots[0], engine.pool.page_bytes(page)) == crc
    scheduler.end_restore(restore, len(restore.pages))


def _first_token(engine: Engine, scheduler: BatchScheduler) -> int:
    while True:
        batch = scheduler.plan()
        assert batch is not None
        drawn = engine.execute(batch)
        scheduler.commit(batch, drawn)
        scheduler.report()
        scheduler.sent()
        if drawn:
            return drawn[0].token
