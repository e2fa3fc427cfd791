"""`lumenbox bench chaos`: a bounded load, faults from a seed, and every stream compared with its failure-free run."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from lumenbox.bench import boxes
from lumenbox.bench.client import Answer, stream
from lumenbox.bench.processes import descendants
from lumenbox.coordinator.control import RemoteError
from lumenbox.errors import LumenboxError

SETTLE_S = 60.0
WORDS = (
    "sea",
    "lamp",
    "stone",
    "river",
    "night",
    "paper",
    "garden",
    "train",
    "window",
    "cloud",
    "bread",
    "clock",
    "forest",
)


@dataclass(slots=True, frozen=True)
class Plan:
    """What an experiment does; all of it follows from these."""

    model: str
    workers: int
    streams: int
    seconds: float
    faults: tuple[str, ...]
    at_once: int
    every_s: float
    seed: int
    flags: tuple[str, ...] = ()


@dataclass(slots=True)
class Tally:
    """What one run saw."""

    streams: int = 0
    failed: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    lost_tokens: int = 0
    duplicated_tokens: int = 0
    different_tokens: int = 0
    done: int = 0
    verified: Counter[str] = field(default_factory=Counter)
    stalls_s: list[float] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    leaks: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    step_ms: list[float] = field(default_factory=list)


def run(plan: Plan, peer: str | None) -> dict[str, Any]:
    """Run the experiment, and its peer after it if one is asked for; returns the document of CONTRACT §6."""
    document = summary(plan, asyncio.run(_experiment(plan, {})))
    if peer is not None:
        flags = (*plan.flags, "--recovery", "restart") if peer == "restart" else plan.flags
        environment = {"LUMENBOX_PRELOAD": "0"} if peer == "cold-start" else {}
        other = Plan(**{**_fields(plan), "flags": flags})
        document["peer"] = {"name": peer, **summary(other, asyncio.run(_experiment(other, environment)))}
        document["ratio"] = _ratios(document, document["peer"])
    return document


def _fields(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in Plan.__slots__}


def _ratios(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float | None]:
    pairs = {
        "stall_p50": (ours["stall_ms"]["p50"], theirs["stall_ms"]["p50"]),
        "first_token_p50": (ours["first_token_ms"]["p50"], theirs["first_token_ms"]["p50"]),
        "respawn_p50": (ours["respawn_ms"]["p50"], theirs["respawn_ms"]["p50"]),
    }
    return {name: round(a / b, 3) if a and b else None for name, (a, b) in pairs.items()}


async def _experiment(plan: Plan, environment: dict[str, str]) -> Tally:
    tally = Tally()
    flags = ("--workers", str(plan.workers), "--seed", str(plan.seed), *plan.flags)
    with boxes.running(plan.model, *flags, environment=environment) as box:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
            bodies = requests_of(plan)
            expected = await _references(session, box, bodies)
            before = await asyncio.to_thread(_level, box)
            end = time.monotonic() + plan.seconds
            async with asyncio.TaskGroup() as tasks:
                for number in range(plan.streams):
                    tasks.create_task(_client(plan, number, session, box, bodies, expected, end, tally))
                tasks.create_task(_injure(plan, box, end, tally))
            await _whole(box)
            tally.reports = await asyncio.to_thread(box.reports)
            after = await asyncio.to_thread(_level, box)
            tally.leaks = {name: after[name] - before[name] for name in before}
            tally.step_ms = [w["step_ms"] for w in (await asyncio.to_thread(box.state))["workers"]]
    return tally


def requests_of(plan: Plan) -> list[dict[str, Any]]:
    """Twice as many different requests as streams: greedy and sampled, with penalties, stop strings, n = 2."""
    rng = random.Random(plan.seed)
    longest = 400 if plan.model == "tiny-random" else 96
    bodies = []
    for number in range(2 * plan.streams):
        words = " ".join(rng.choices(WORDS, k=rng.choice([8, 40, 160])))
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": f"{number}: {words}"}],
            "max_tokens": rng.randint(longest // 4, longest),
            "temperature": 0.0,
            "ignore_eos": True,
        }
        match number % 4:
            case 1:
                body |= {"temperature": 0.9, "seed": rng.getrandbits(40), "top_p": 0.95}
            case 2:
                body |= {"temperature": 1.0, "seed": rng.getrandbits(40), "n": 2, "presence_penalty": 0.6}
            case 3:
                body |= {"stop": ["e"], "min_tokens": longest // 4, "frequency_penalty": 0.4}
            case _:
                pass
        bodies.append(body)
    return bodies


async def _references(session: aiohttp.ClientSession, box: boxes.Box, bodies: list[dict[str, Any]]) -> list[Answer]:
    expected = [await stream(session, box.endpoint, body) for body in bodies]
    for answer in expected:
        if answer.error or not answer.done:
            raise LumenboxError(f"the failure-free run failed: {answer.error}")
    return expected


async def _client(
    plan: Plan,
    number: int,
    session: aiohttp.ClientSession,
    box: boxes.Box,
    bodies: Sequence[dict[str, Any]],
    expected: Sequence[Answer],
    end: float,
    tally: Tally,
) -> None:
    rng = random.Random(plan.seed * 1000 + number)
    while time.monotonic() < end:
        choice = rng.randrange(len(bodies))
        answer = await stream(session, box.endpoint, bodies[choice])
        _compare(answer, expected[choice], tally)


def _compare(answer: Answer, expected: Answer, tally: Tally) -> None:
    tally.streams += 1
    tally.tokens += sum(map(len, answer.token_ids.values()))
    if answer.error or not answer.done:
        tally.failed += 1
        tally.errors[answer.error["code"] if answer.error else "cut"] += 1
        return
    if answer.recoveries:
        tally.stalls_s.append(answer.stall_s)
    for index, wanted in expected.token_ids.items():
        got = answer.token_ids.get(index, [])
        tally.lost_tokens += max(0, len(wanted) - len(got))
        tally.duplicated_tokens += max(0, len(got) - len(wanted))
        tally.different_tokens += sum(a != b for a, b in zip(got, wanted, strict=False))
    if answer.outcome != expected.outcome and answer.token_ids == expected.token_ids:
        tally.different_tokens += 1  # same ids, but another text, ending or count


async def _injure(plan: Plan, box: boxes.Box, end: float, tally: Tally) -> None:
    """One round of faults every so often; the next waits until every victim is replaced and the box whole again."""
    rng = random.Random(plan.seed)
    while time.monotonic() + plan.every_s < end:
        await asyncio.sleep(plan.every_s * rng.uniform(0.5, 1.0))
        kind = rng.choice(plan.faults)
        victims = rng.sample(range(plan.workers), min(plan.at_once, plan.workers))
        before = [row["incarnation"] for row in (await asyncio.to_thread(box.state))["workers"]]
        for worker in victims:
            tally.done += 1
            tally.verified[await asyncio.to_thread(_fault, box, kind, worker)] += 1
        for worker in victims:
            await _replaced(box, kind, worker, before[worker])
        await _whole(box)


def _fault(box: boxes.Box, kind: str, worker: int) -> str:
    """Injure a worker; returns what was done. Damaged pages show when they are loaded, so a loss follows `corrupt`."""
    if kind == "corrupt":
        try:
            box.ask("chaos", kind="corrupt", worker=worker)
        except RemoteError:
            kind = "lose"  # it serves nothing that could be damaged
        box.ask("chaos", kind="lose", worker=worker)
        return kind
    arguments = {"factor": 12.0} if kind == "slow" else {}
    answer = box.ask("chaos", kind=kind, worker=worker, **arguments)
    if not answer["verified"]:
        raise LumenboxError(f"{kind} {worker} did not take hold")
    return kind


async def _replaced(box: boxes.Box, kind: str, worker: int, before: int) -> None:
    """Wait for the next incarnation. A slow or frozen worker without work harms nobody and may be let go."""
    deadline = time.monotonic() + (10.0 if kind in ("hang", "slow") else SETTLE_S)
    while time.monotonic() < deadline:
        if (await asyncio.to_thread(box.state))["workers"][worker]["incarnation"] > before:
            return
        await asyncio.sleep(0.02)
    await asyncio.to_thread(box.ask, "chaos", kind="clear", worker=worker)


async def _whole(box: boxes.Box) -> None:
    deadline = time.monotonic() + SETTLE_S
    while (await asyncio.to_thread(box.state))["state"] != "ready":
        if time.monotonic() > deadline:
            raise LumenboxError(f"the box is not whole again after {SETTLE_S:.0f} s")
        await asyncio.sleep(0.02)


def _level(box: boxes.Box) -> dict[str, int]:
    """What must come back to where it was."""
    state = box.state()
    deadline = time.monotonic() + 10.0
    while _is_busy(state) and time.monotonic() < deadline:
        time.sleep(0.05)
        state = box.state()
    return {
        "pages": sum(worker["pages_used"] for worker in state["workers"]),
        "processes": len(descendants(box.pid)),
        "fds": sum(1 for fd in os.listdir(f"/proc/{box.pid}/fd") if _is_kept(box.pid, fd)),
    }


def _is_busy(state: dict[str, Any]) -> bool:
    """Whether a request is left, or pages of one: a worker tells of those a frame later than of its end."""
    pages = sum(worker["pages_used"] for worker in state["workers"])
    return bool(state["requests"]["running"] + state["requests"]["waiting"] + pages)


def _is_kept(pid: int, fd: str) -> bool:
    """Client connections come and go; everything else must not pile up."""
    try:
        return "socket:" not in os.readlink(f"/proc/{pid}/fd/{fd}")
    except FileNotFoundError:
        return False


def summary(plan: Plan, tally: Tally) -> dict[str, Any]:
    """The document of CONTRACT §6."""
    ways = Counter(row["way"] for report in tally.reports for row in report["requests"])
    detect: dict[str, list[float]] = {}
    for report in tally.reports:
        detect.setdefault(report["cause"], []).append(report["detect_s"])
    return {
        "schema": 1,
        "model": plan.model,
        "workers": plan.workers,
        "seed": plan.seed,
        "flags": list(plan.flags),
        "faults": {"done": tally.done, "verified": tally.verified.total(), "by_kind": dict(tally.verified)},
        "streams": tally.streams,
        "tokens": tally.tokens,
        "interrupted": sum(ways.values()),
        "failed": tally.failed,
        "errors": dict(tally.errors),
        "lost_tokens": tally.lost_tokens,
        "duplicated_tokens": tally.duplicated_tokens,
        "different_tokens": tally.different_tokens,
        "stall_ms": _quantiles(tally.stalls_s) | {"max": round(1000 * max(tally.stalls_s, default=0.0), 1)},
        "detect_ms": {cause: _quantiles(values) for cause, values in detect.items()},
        "first_token_ms": _quantiles([r["first_token_s"] for r in tally.reports if r["first_token_s"] is not None]),
        "respawn_ms": _quantiles([r["respawn_s"] for r in tally.reports if r["respawn_s"] is not None]),
        "ways": {"reattach": 0, "restore": 0, "recompute": 0, **ways},
        "leaks": tally.leaks,
    }


def _quantiles(values_s: list[float]) -> dict[str, float]:
    ordered = sorted(values_s)
    if not ordered:
        return {"p50": 0.0, "p99": 0.0}
    return {
        "p50": round(1000 * ordered[len(ordered) // 2], 1),
        "p99": round(1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 1),
    }
