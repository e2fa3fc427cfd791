"""What the control socket understands. Each verb is an async generator of JSON answers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

from lumenbox.coordinator.box import Box
from lumenbox.coordinator.control import Verb

NOW = 0
"""In the queue of signals: stop without draining."""


def table(box: Box, signals: asyncio.Queue[int]) -> dict[str, Verb]:
    """The verbs of one box."""

    async def status(call: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        yield box.state()

    async def down(call: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        signals.put_nowait(NOW if call.get("now") else signal.SIGTERM)
        yield {}

    async def events(call: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        seen = int(call.get("since", 0))
        while True:
            for event in box.events.since(seen):
                seen = event["seq"]
                yield event
            if not call.get("follow"):
                return
            await box.events.wait()

    return {"status": status, "down": down, "events": events}
