"""A control server that knows one document of each kind, and remembers what it was told to do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from tui_documents import events, report, state

from lumenbox.coordinator.control import Verb
from lumenbox.errors import LumenboxError


class FakeBox:
    """`documents` and `events` may be changed between looks."""

    def __init__(self) -> None:
        self.state = state()
        self.events = list(events())
        self.report = report()
        self.calls: list[dict[str, Any]] = []

    def verbs(self) -> dict[str, Verb]:
        return {
            "status": self._status,
            "events": self._events,
            "report": self._report,
            "chaos": self._steer,
            "drain": self._steer,
            "restart": self._refuse,
            "down": self._steer,
        }

    async def _status(self, call: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        yield self.state

    async def _events(self, call: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        for event in self.events:
            if event["seq"] > call["since"]:
                yield event

    async def _report(self, call: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        self.calls.append(call)
        yield self.report

    async def _steer(self, call: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        self.calls.append(call)
        yield {"verified": "exiting"} if "kind" in call else {"state": "drained"}

    async def _refuse(self, call: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        raise LumenboxError("not now")
        yield {}
