"""Eight chats at once on a box of four workers, twice; the second time a worker is killed in mid-stream."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import aiohttp

from lumenbox.bench import boxes
from lumenbox.bench.client import Answer, stream

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
QUESTIONS = [
    "Why is the sea salty?",
    "Tell me a story about a lighthouse.",
    "How does a sailing boat move against the wind?",
    "Write four lines about rain.",
    "What is a prime number?",
    "Give me three ideas for dinner.",
    "Explain what an echo is to a child.",
    "Who was Ada Lovelace?",
]


def bodies() -> list[dict[str, Any]]:
    """Half of the chats greedy, half sampled with a seed."""
    return [
        {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 64,
            "temperature": 0.8 * (number % 2),
            "seed": number,
        }
        for number, question in enumerate(QUESTIONS)
    ]


async def chats(box: boxes.Box, victim: int | None) -> list[Answer]:
    """Stream all chats at once; with a victim, kill that worker once every stream has begun."""
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        streams = [tasks.create_task(stream(session, box.endpoint, body)) for body in bodies()]
        if victim is not None:
            tasks.create_task(kill_in_mid_stream(box, victim))
    return [task.result() for task in streams]


async def kill_in_mid_stream(box: boxes.Box, victim: int) -> None:
    """Once the victim has drawn some tokens of its streams, as its own counter shows."""
    before = (await asyncio.to_thread(box.state))["workers"][victim]["tokens"]
    while True:
        worker = (await asyncio.to_thread(box.state))["workers"][victim]
        if worker["running"] and worker["tokens"] - before >= 10 * worker["running"]:
            break
        await asyncio.sleep(0.02)
    print(f"$ lumenbox chaos kill {victim}", flush=True)
    command = [sys.executable, "-m", "lumenbox", "chaos", "kill", str(victim), "--run-dir", str(box.run_dir)]
    process = await asyncio.create_subprocess_exec(*command)
    assert await process.wait() == 0, "the kill did not take hold"


def proof(expected: list[Answer], got: list[Answer]) -> bool:
    """Print what was lost, doubled or changed; whether nothing was."""
    lost = duplicated = identical = 0
    for want, have in zip(expected, got, strict=True):
        wanted, had = want.token_ids.get(0, []), have.token_ids.get(0, [])
        lost += max(0, len(wanted) - len(had))
        duplicated += max(0, len(had) - len(wanted))
        identical += have.outcome == want.outcome and have.done and have.error is None
    print(f"lost {lost}  duplicated {duplicated}  identical {identical}/{len(expected)}")
    return identical == len(expected)


def main() -> int:
    subprocess.run([sys.executable, "-m", "lumenbox", "models", "pull", MODEL], check=True)
    with boxes.running(MODEL, "--workers", "4", "--max-model-len", "2048") as box:
        print(f"a box of 4 workers serves {MODEL} at {box.endpoint}", flush=True)
        expected = asyncio.run(chats(box, None))
        for answer in expected[:2]:
            print(f"  … {answer.text[0].strip()[:100]!r}")
        print("the same eight chats once more, now with a death in the middle", flush=True)
        got = asyncio.run(chats(box, victim=1))
        recoveries = sum(answer.recoveries for answer in got)
        print(f"{recoveries} streams changed their worker; longest pause {max(a.stall_s for a in got):.2f} s")
        same = proof(expected, got)
        subprocess.run([sys.executable, "-m", "lumenbox", "report", "--run-dir", str(box.run_dir)], check=True)
    return 0 if same and recoveries else 1


if __name__ == "__main__":
    sys.exit(main())
