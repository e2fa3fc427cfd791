"""`lumenbox bench overhead`: CPU time per token of a whole box, with some flags and without, in pairs of one run.

CPU time of all processes of the box, from /proc, so that what else the machine does matters little; pairs in the order
A B, B A, A B, … so that a drift of the machine cancels out; the interval is Student's over the pairs' ratios.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from typing import Any

import aiohttp

from lumenbox.bench import boxes
from lumenbox.bench.client import stream
from lumenbox.bench.processes import descendants
from lumenbox.bench.statistic import interval_95
from lumenbox.errors import LumenboxError

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def run(model: str, workers: int, streams: int, pairs: int, flags: str, versus: str) -> dict[str, Any]:
    """Decode (short prompts, long answers) and prefill (long prompts, one token), each in `pairs` pairs."""
    return {
        "schema": 1,
        "model": model,
        "workers": workers,
        "streams": streams,
        "flags": flags,
        "versus": versus,
        **{phase: _compare(model, workers, streams, pairs, flags, versus, phase) for phase in ("decode", "prefill")},
    }


def _compare(model: str, workers: int, streams: int, pairs: int, flags: str, versus: str, phase: str) -> dict[str, Any]:
    ratios, costs = [], []
    common = ("--workers", str(workers))
    with (
        boxes.running(model, *common, *flags.split()) as ours,
        boxes.running(model, *common, *versus.split()) as theirs,
    ):
        for box in (ours, theirs):
            _cpu_us_per_token(box, streams, phase, -1)  # warm: caches, lazy imports, the step model
        for number in range(pairs):
            order = (ours, theirs) if number % 2 == 0 else (theirs, ours)
            cost = {box.pid: _cpu_us_per_token(box, streams, phase, number) for box in order}
            ratios.append(cost[ours.pid] / cost[theirs.pid])
            costs.append(cost[ours.pid])
    mean, half = interval_95(ratios)
    return {
        "pairs": pairs,
        "cpu_us_per_token": round(statistics.median(costs), 1),
        "ratio": round(mean, 4),
        "ci95": round(half, 4),
    }


def _cpu_us_per_token(box: boxes.Box, streams: int, phase: str, number: int) -> float:
    before = _cpu_s(box.pid)
    tokens = asyncio.run(_load(box, streams, phase, number))
    return 1e6 * (_cpu_s(box.pid) - before) / tokens


async def _load(box: boxes.Box, streams: int, phase: str, number: int) -> int:
    """A fixed amount of work; returns its tokens. Prompts differ from round to round, not between boxes."""
    words, answer = (8, 160) if phase == "decode" else (400, 1)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
        bodies = [
            {
                "messages": [{"role": "user", "content": f"{number} {index} " + "sea lamp " * (words // 2)}],
                "max_tokens": answer,
                "ignore_eos": True,
                "temperature": 0,
            }
            for index in range(streams)
        ]
        answers = await asyncio.gather(*(stream(session, box.endpoint, body) for body in bodies))
    if failed := [answer.error for answer in answers if answer.error or answer.usage is None]:
        raise LumenboxError(f"a request failed: {failed[0]}")
    key = "completion_tokens" if phase == "decode" else "prompt_tokens"
    return sum(answer.usage[key] for answer in answers if answer.usage)


def _cpu_s(root: int) -> float:
    """User and system time of a process and all its descendants."""
    ticks = 0
    for pid in [root, *descendants(root)]:
        try:
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except FileNotFoundError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS_PER_S
