"""The control socket: one JSON object a line in, answers a line each. Mode 0600; the only way to steer a box."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from lumenbox.errors import LumenboxError, NotRunning, TimedOut

SOCKET_NAME = "control.sock"
Verb = Callable[[dict[str, Any]], AsyncIterator[dict[str, Any]]]


class ControlServer:
    """Serves verbs: each is an async generator of answers. The last answer of every call has `done`."""

    def __init__(self, run_dir: Path, verbs: dict[str, Verb]) -> None:
        self._path = run_dir / SOCKET_NAME
        self._verbs = verbs
        self._calls: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Listen; the run directory's lock makes sure that a socket found there is a leftover."""
        self._path.unlink(missing_ok=True)
        old_mask = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._serve, str(self._path))
        finally:
            os.umask(old_mask)

    async def close(self) -> None:
        """Stop listening, end the calls that still follow something, and take the name away."""
        self._server.close()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            await self._answer(await reader.readline(), writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._calls.discard(task)
            writer.close()

    async def _answer(self, line: bytes, writer: asyncio.StreamWriter) -> None:
        try:
            call = msgspec.json.decode(line, type=dict[str, Any])
            verb = self._verbs[call.get("verb", "")]
        except (msgspec.DecodeError, KeyError):
            writer.write(_line({"error": "unknown verb", "done": True, "exit_code": 2}))
            return
        try:
            async with aclosing(verb(call)) as answers:  # type: ignore[type-var]
                async for answer in answers:
                    writer.write(_line(answer))
                    await writer.drain()
            writer.write(_line({"done": True}))
        except LumenboxError as error:
            writer.write(_line({"error": str(error), "done": True, "exit_code": error.exit_code}))
        await writer.drain()


def _line(document: dict[str, Any]) -> bytes:
    return msgspec.json.encode(document) + b"\n"


class RemoteError(LumenboxError):
    """The box refused or failed a verb."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def call(run_dir: Path, verb: str, timeout_s: float | None = 30.0, **arguments: Any) -> Iterator[dict[str, Any]]:
    """The client's side, synchronous: send a verb, yield its answers. Raises NotRunning, TimedOut, RemoteError."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(timeout_s)
        try:
            sock.connect(str(run_dir / SOCKET_NAME))
            sock.sendall(_line({"verb": verb, **arguments}))
            with sock.makefile("rb") as lines:
                for line in lines:
                    answer = msgspec.json.decode(line, type=dict[str, Any])
                    if "error" in answer:
                        raise RemoteError(answer["error"], answer.get("exit_code", 1))
                    if answer.get("done"):
                        return
                    yield answer
        except (FileNotFoundError, ConnectionRefusedError):
            raise NotRunning(f"no lumenbox is running in {run_dir}; start one with `lumenbox up`") from None
        except TimeoutError:
            raise TimedOut(f"{verb} took longer than {timeout_s:.0f} s") from None
    raise NotRunning("the box ended before it answered")


def ask(run_dir: Path, verb: str, timeout_s: float | None = 30.0, **arguments: Any) -> dict[str, Any]:
    """The first answer of a verb, {} if it gives none."""
    answers = list(call(run_dir, verb, timeout_s, **arguments))
    return answers[0] if answers else {}
