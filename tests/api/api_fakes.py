"""A box and a tokenizer of a few lines, and a raw client that sees every byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from lumenbox.api.server import Server
from lumenbox.coordinator.figures import Figures
from lumenbox.coordinator.streams import Delta, GenerationSpec, ModelInfo
from lumenbox.core.requests import Sampled
from lumenbox.errors import RequestError

EOS = 256
WORDS = ("Hel", "lo", " wörld", " 😀", "!")
Step = list[Delta] | RequestError | asyncio.Event


class FakeTokenizer:
    """One token a byte, and one more that ends."""

    vocab_size = 257
    eos_ids = (EOS,)
    token_bytes = [bytes([i]) for i in range(256)] + [b""]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[dict[str, Any]], /, **kwargs: Any) -> list[int]:
        if kwargs.get("refuse"):
            raise RequestError("the template refuses", param="messages")
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages))

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.token_bytes[i] for i in ids).decode(errors="replace")


class FakeStream:
    """Plays its steps: deltas are given, errors raised, events waited for."""

    def __init__(self, spec: GenerationSpec, steps: list[Step]) -> None:
        self.steps = list(steps)
        self.prompt_tokens = sum(map(len, spec.prompts))
        self.completion_tokens = 0
        self.drawn = 0
        self.cached_tokens = 0
        self.recoveries = 0
        self.closed = asyncio.Event()

    async def next(self) -> list[Delta]:
        while self.steps:
            step = self.steps.pop(0)
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, Exception):
                raise step
            else:
                self.drawn += sum(len(delta.tokens) for delta in step)
                return step
        self.completion_tokens = self.drawn
        raise StopAsyncIteration

    def close(self) -> None:
        self.closed.set()


class FakeService:
    """Answers every choice with WORDS unless `steps` says otherwise."""

    def __init__(self) -> None:
        self.info = ModelInfo("tiny", max_model_len=2048, vocab_size=257, created=17)
        self.figures = Figures()
        self.figures.failures["exit"] = 4
        self.steps: list[Step] | None = None
        self.refuse: RequestError | None = None
        self.recoveries = 0
        self.streams: list[FakeStream] = []
        self.specs: list[GenerationSpec] = []
        self.box_state = "ready"
        self.worker_states = ["ready", "dead"]

    def submit(self, spec: GenerationSpec) -> FakeStream:
        self.specs.append(spec)
        if self.refuse is not None:
            raise self.refuse
        stream = FakeStream(spec, self.steps if self.steps is not None else words(len(spec.prompts) * spec.n))
        stream.recoveries = self.recoveries
        self.streams.append(stream)
        return stream

    def state(self) -> dict[str, Any]:
        fields = {"running": 1, "waiting": 2, "pages_used": 3, "pages_total": 12, "arena_pages": 5}
        fields |= {"arena_budget_pages": 50, "arena_bytes": 5120, "sealed_bytes": 7168, "sealed_bytes_s": 0}
        fields |= {"restored_bytes": 2048, "restore_s": 0}
        return {
            "state": self.box_state,
            "workers": [{"id": i, "state": state, **fields} for i, state in enumerate(self.worker_states)],
            "counters": {"aborts": 0, "generated_tokens": 99, "worker_deaths": 4},
            "checkpoint": {"coverage": 0.0, "holder_balance": 0.0, "lag_tokens": 0, "evictions": 3},
            "assist": {"active": 0, "acceptance": None},
        }


def sampled(text: str) -> list[Sampled]:
    """The tokens of a text, with a logprob and one alternative."""
    return [Sampled(byte, -0.5, ((byte, -0.5), (65, float("-inf")))) for byte in text.encode()]


def words(choices: int, finish: str = "stop") -> list[Step]:
    """Every choice says WORDS, in turns."""
    steps: list[Step] = [[Delta(c, word, sampled(word)) for c in range(choices)] for word in WORDS]
    return [*steps, [Delta(c, "", [], finish) for c in range(choices)]]


class RawClient:
    """One connection, byte for byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, port: int, host: str = "127.0.0.1") -> RawClient:
        return cls(*await asyncio.open_connection(host, port))

    async def post(self, path: str, body: Any, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        head += "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        self.writer.write(head.encode() + b"\r\n" + data)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and lower-case headers."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.partition(": ") for line in lines[1:] if line)
        return int(lines[0].split()[1]), {name.lower(): value for name, _, value in pairs}

    async def chunks(self) -> list[bytes]:
        """Every HTTP chunk of a body; raises IncompleteReadError where the end is missing."""
        found = []
        while True:
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            data = await self.reader.readexactly(size + 2)
            if size == 0:
                return found
            found.append(data[:-2])

    async def gone(self) -> bytes:
        """What still comes until the server has closed."""
        try:
            return await self.reader.read()
        except ConnectionError:
            return b""

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        """Drop the connection at once."""
        self.writer.transport.abort()


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for what has no event of its own."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def chat(text: str = "hi", **fields: Any) -> dict[str, Any]:
    """A chat body."""
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}


def events(chunks: list[bytes]) -> list[Any]:
    """The JSON of every data event; [DONE] as the string."""
    lines = [line[6:] for line in b"".join(chunks).decode().split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@dataclass
class Served:
    """The fake box and ways to talk to it."""

    service: FakeService
    server: Server
    port: int
    session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def request(self, method: str, path: str, **kwargs: Any) -> tuple[int, Any, Any]:
        """Status, headers and JSON of one answer."""
        async with self.session.request(method, self.url + path, **kwargs) as response:
            return response.status, response.headers, await response.json()

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any, Any]:
        key = "data" if isinstance(body, bytes) else "json"
        headers = {"Content-Type": "application/json"}
        return await self.request("POST", path, **{key: body, "headers": headers, **kwargs})

    async def raw(self) -> RawClient:
        return await RawClient.open(self.port)


Serve = Callable[..., Awaitable[Served]]
