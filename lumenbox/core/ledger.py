"""Every request's tokens and what its client has been given of them. Beside the state machine, pure as well.

The ledger is the record that recovery starts from: tokens of another epoch are dropped, also from a live worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lumenbox.core.requests import Sampled, SamplingParams
from lumenbox.core.text import TextAssembler


@dataclass(slots=True, eq=False)
class Entry:
    """One request: parameters and tokens (prompt + generated), its epoch, and the state of its text."""

    rid: int
    params: SamplingParams
    tokens: list[int]
    num_prompt: int
    text: TextAssembler
    include_stop: bool
    priority: int = 0
    epoch: int = 0
    recoveries: int = 0
    is_recovering: bool = False
    """A report waits for its next token from another worker, or another life of its own."""
    is_rebalanced: bool = False
    """It is about to move for balance: no recovery."""
    cached: int | None = None
    arrived: float = 0.0
    finish_reason: str | None = None
    slots: list[tuple[int, ...]] = field(default_factory=list)
    """Arena slots of its first pages, one per replica."""
    loading: int = 0
    """Sealed pages that its heir was given to load."""

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt


@dataclass(slots=True)
class Gain:
    """What one frame added to a request's answer. `stopped` means that the worker does not know yet that it ended."""

    text: str = ""
    tokens: list[Sampled] = field(default_factory=list)
    finish_reason: str | None = None
    stopped: bool = False


class Ledger:
    """All requests that have not ended, by rid. `token_bytes[i]` is what token i adds to the text."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._bytes = token_bytes
        self.entries: dict[int, Entry] = {}
        self.generated_tokens = 0

    def open(
        self,
        rid: int,
        params: SamplingParams,
        prompt: list[int],
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        priority: int = 0,
    ) -> Entry:
        """Start the record of a request."""
        text = TextAssembler(stop, include_stop)
        entry = Entry(rid, params, list(prompt), len(prompt), text, include_stop, priority)
        self.entries[rid] = entry
        return entry

    def close(self, rid: int) -> None:
        """Forget a request that ended or whose client left."""
        self.entries.pop(rid, None)

    def extend(self, rid: int, epoch: int, drawn: Sequence[Sampled], reason: str | None) -> Gain | None:
        """Enter the tokens of one frame, in order; `reason` if the worker ended the request with them.

        None if the request is gone, has ended by a stop string, or is another epoch's.
        """
        entry = self.entries.get(rid)
        if entry is None or entry.epoch != epoch or entry.finish_reason is not None:
            return None
        gain = Gain()
        for position, token in enumerate(drawn):
            entry.tokens.append(token.token)
            self.generated_tokens += 1
            is_last = reason is not None and position == len(drawn) - 1
            if self._feed(entry, token, is_last and reason == "stop", gain):
                return gain
        if reason is not None:
            self._end(entry, reason, gain)
        return gain

    def _feed(self, entry: Entry, drawn: Sampled, is_end_token: bool, gain: Gain) -> bool:
        """Add one token's text to `gain`; True if a stop string ended the request here."""
        if is_end_token and not entry.include_stop:
            out = entry.text.finish(drawn)
        else:
            piece = self._bytes[drawn.token] if drawn.token < len(self._bytes) else b""
            out = entry.text.feed(drawn, piece, entry.num_generated >= entry.params.min_tokens)
        gain.text += out.text
        gain.tokens += out.tokens
        if out.stopped:
            entry.finish_reason = gain.finish_reason = "stop"
            gain.stopped = True
        return out.stopped

    def _end(self, entry: Entry, reason: str, gain: Gain) -> None:
        out = entry.text.finish()
        gain.text += out.text
        gain.tokens += out.tokens
        entry.finish_reason = gain.finish_reason = reason
