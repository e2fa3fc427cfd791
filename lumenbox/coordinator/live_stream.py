"""The answer to one HTTP call while it is made: collects what frames bring, and wakes its one consumer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from lumenbox.coordinator.streams import Delta
from lumenbox.core.ledger import Entry, Gain
from lumenbox.errors import RequestError

SILENCE_S = 10.0
"""After so long without news the consumer is told to keep the line alive."""


class LiveStream:
    """See `streams.Stream`. `choices` are the ledger's entries: the `n` of the first prompt, those of the second, …"""

    def __init__(self, choices: list[Entry], n: int, abandon: Callable[[list[int]], None]) -> None:
        self.prompt_tokens = sum(entry.num_prompt for entry in choices[::n])
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.recoveries = 0
        self.last_news = time.monotonic()
        self._choice_of = {entry.rid: index for index, entry in enumerate(choices)}
        self._open = {entry.rid: entry for entry in choices}
        self._first_choices = {entry.rid for entry in choices[::n]}
        self._abandon = abandon
        self._news: list[Delta] = []
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> list[Delta]:
        """Wait for news; see `streams.Stream.next`."""
        if not self._news:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            if not self._news and self._error is not None:
                raise self._error
        news, self._news = self._news, []
        return news

    def close(self) -> None:
        """The consumer leaves; what still runs is abandoned."""
        left, self._open = list(self._open), {}
        if left:
            self._abandon(left)

    def gained(self, entry: Entry, gain: Gain) -> None:
        """A frame brought something for one choice."""
        if entry.rid not in self._open:
            return
        if gain.text or gain.tokens or gain.finish_reason:
            self._news.append(Delta(self._choice_of[entry.rid], gain.text, gain.tokens, gain.finish_reason))
        if gain.finish_reason is not None:
            del self._open[entry.rid]
            self.completion_tokens += entry.num_generated
            if entry.rid in self._first_choices:
                self.cached_tokens += entry.cached or 0
        if self._news:
            self.last_news = time.monotonic()
            self._wake()

    def failed(self, rid: int, error: RequestError) -> None:
        """One choice cannot go on, so the answer as a whole cannot; its consumer abandons the others with `close`."""
        if self._open.pop(rid, None) is not None:
            self._error = error
            self._wake()

    def beat(self, now: float) -> None:
        """Called every second or so: wake a consumer that has heard nothing for long."""
        if now - self.last_news >= SILENCE_S:
            self.last_news = now
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
