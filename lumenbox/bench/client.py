"""A streaming client that keeps what comparisons need: ids, text, times, endings."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec


@dataclass(slots=True)
class Answer:
    """One streamed answer. `times` are the arrivals (monotonic seconds) of the events that carried content."""

    status: int
    sent: float
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    recoveries: int = 0
    done: bool = False

    @property
    def outcome(self) -> tuple[Any, ...]:
        """All that must equal the failure-free run's."""
        return (self.token_ids, self.text, self.finish, self.usage and self.usage["completion_tokens"])

    @property
    def stall_s(self) -> float:
        """The longest gap between two events."""
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


async def stream(session: aiohttp.ClientSession, endpoint: str, body: dict[str, Any]) -> Answer:
    """Ask for a chat completion, with ids and usage, and read it to its end."""
    body = {**body, "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    sent = time.monotonic()
    async with session.post(endpoint + "/v1/chat/completions", json=body) as response:
        answer = Answer(response.status, sent)
        if response.status != 200:
            answer.error = (await response.json())["error"]
            return answer
        async for line in response.content:
            if line.startswith(b"data: {"):
                _enter(answer, msgspec.json.decode(line[6:]))
            elif line.startswith(b"data: [DONE]"):
                answer.done = True
    return answer


def _enter(answer: Answer, event: dict[str, Any]) -> None:
    answer.error = event.get("error", answer.error)
    answer.usage = event.get("usage") or answer.usage
    answer.recoveries = event.get("lumenbox", {}).get("recoveries", answer.recoveries)
    for choice in event.get("choices", []):
        index = choice["index"]
        content = choice["delta"].get("content") or ""
        answer.token_ids.setdefault(index, []).extend(choice.get("token_ids") or [])
        answer.text[index] = answer.text.get(index, "") + content
        if content:
            answer.times.append(time.monotonic())
        if choice["finish_reason"]:
            answer.finish[index] = choice["finish_reason"]
