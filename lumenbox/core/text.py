"""From token ids to the text a client sees: whole characters only, and never a part of a stop string.

A pure function of (tokens, stop strings), advanced token by token, so any worker and any coordinator gets the same.
"""

from __future__ import annotations

import codecs
from collections import deque
from dataclasses import dataclass, field

from lumenbox.core.requests import Sampled


@dataclass(slots=True)
class Release:
    """Text that may go out now, and the tokens whose text it completes; `stopped` if a stop string ended it."""

    text: str = ""
    tokens: list[Sampled] = field(default_factory=list)
    stopped: bool = False


class TextAssembler:
    """One choice's text. `stop` are its stop strings; `include_stop` lets the matched one through."""

    __slots__ = ("_decoder", "_held", "_include_stop", "_queue", "_released", "_stop")

    def __init__(self, stop: tuple[str, ...] = (), include_stop: bool = False) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = stop
        self._include_stop = include_stop
        self._held = ""
        """Decoded, not released: its end may be the beginning of a stop string."""
        self._released = 0
        self._queue: deque[tuple[int, Sampled]] = deque()
        """Tokens not released, each with the position in the text at which it is."""

    def feed(self, drawn: Sampled, piece: bytes, may_stop: bool = True) -> Release:
        """Add one token and its bytes. A stop string complete while `may_stop` is False (min_tokens) is plain text."""
        text = self._decoder.decode(piece)
        incomplete = bool(self._decoder.getstate()[0])
        if not (self._held or self._queue or incomplete or self._stop):
            self._released += len(text)
            return Release(text, [drawn])
        self._held += text
        self._queue.append((self._released + len(self._held) + incomplete, drawn))
        if self._stop and may_stop and (match := self._first_match(len(text))):
            return self._cut(match)
        return self._release(len(self._held) - self._open_suffix())

    def finish(self, last: Sampled | None = None) -> Release:
        """Nothing follows: release all, a torn character as U+FFFD; `last` is an end token without text of its own."""
        self._held += self._decoder.decode(b"", True)
        out = self._release(len(self._held))
        out.tokens.extend(drawn for _, drawn in self._queue)
        self._queue.clear()
        if last is not None:
            out.tokens.append(last)
        return out

    def _first_match(self, fresh: int) -> tuple[int, int] | None:
        """(begin, end) in `_held` of the match that is complete first; of several, the one that begins first."""
        found = []
        for stop in self._stop:
            begin = self._held.find(stop, max(0, len(self._held) - fresh - len(stop) + 1))
            if begin >= 0:
                found.append((begin + len(stop), begin))
        if not found:
            return None
        end, begin = min(found)
        return begin, end

    def _cut(self, match: tuple[int, int]) -> Release:
        out = self._release(match[1] if self._include_stop else match[0])
        out.stopped = True
        self._held = ""
        self._queue.clear()
        return out

    def _open_suffix(self) -> int:
        """Length of the longest end of `_held` that can still grow into a stop string."""
        longest = max((len(stop) for stop in self._stop), default=0)
        for length in range(min(longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0

    def _release(self, count: int) -> Release:
        text, self._held = self._held[:count], self._held[count:]
        self._released += len(text)
        tokens: list[Sampled] = []
        while self._queue and self._queue[0][0] <= self._released:
            tokens.append(self._queue.popleft()[1])
        return Release(text, tokens)
