"""`lumenbox bench overhead`: CPU time per token of a whole box, with some flags and without, in pairs of one run.

CPU time of all processes of a box, from /proc, so that waiting does not count. Both boxes do the same work at the same
time: on a shared machine the same work costs up to a fifth more CPU time from one moment to the next (measured here:
turns of 20 s each gave ratios from 0.91 to 1.22), and so the bad moments are the same for both. Cores are not equal
either (one run's workers kept theirs, and the interval lay 7 % off): each box's workers have half of them, and swap in
the middle of a pair. The interval is Student's over the pairs' ratios.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from contextlib import suppress
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
        _cpu_us_per_token(ours, theirs, streams, phase, -1)  # warms up: caches, lazy imports, the step model
        for number in range(pairs):
            cost, other = _cpu_us_per_token(ours, theirs, streams, phase, number)
            ratios.append(cost / other)
            costs.append(cost)
    mean, half = interval_95(ratios)
    return {
        "pairs": pairs,
        "cpu_us_per_token": round(statistics.median(costs), 1),
        "ratio": round(mean, 4),
        "ci95": round(half, 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


def _cpu_us_per_token(ours: boxes.Box, theirs: boxes.Box, streams: int, phase: str, number: int) -> tuple[float, float]:
    """Of each, both under the same load; half of it on the one half of the cores, half on the other."""
    cores = sorted(os.sched_getaffinity(0))
    halves = (cores[: len(cores) // 2] or cores, cores[len(cores) // 2 :])
    costs = [0.0, 0.0]
    for turn in range(2):
        _bind(ours, halves[turn])
        _bind(theirs, halves[1 - turn])
        for place, cost in enumerate(asyncio.run(_side_by_side((ours, theirs), streams, phase, 2 * number + turn))):
            costs[place] += cost / 2
    return costs[0], costs[1]


def _bind(box: boxes.Box, cores: list[int]) -> None:
    for pid in descendants(box.pid):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread), cores)


async def _side_by_side(pair: tuple[boxes.Box, boxes.Box], streams: int, phase: str, number: int) -> list[float]:
    return await asyncio.gather(*(_of_one(box, streams, phase, number) for box in pair))


async def _of_one(box: boxes.Box, streams: int, phase: str, number: int) -> float:
    before = _cpu_s(box.pid)
    tokens = await _load(box, streams, phase, number)
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
