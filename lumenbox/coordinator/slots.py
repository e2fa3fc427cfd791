"""One worker slot as the shell sees it: what outlives the incarnations (pool, mirror), and the one that lives now."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field

from lumenbox.coordinator.link import WorkerLink
from lumenbox.core.mirror import PoolMirror
from lumenbox.wire import frames


@dataclass(slots=True)
class Slot:
    """Owner of the slot's KV-pool descriptor."""

    worker: int
    pool_fd: int = -1
    pool_identity: str = ""
    """What the pool's pages were computed with; nothing of another identity is ever attached to."""
    mirror: PoolMirror = field(default_factory=PoolMirror)
    link: WorkerLink | None = None
    birth: asyncio.Task[None] | None = None
    """The next incarnation on its way, until `link` is there."""
    returning: dict[int, int] = field(default_factory=dict)
    """Requests that the next incarnation re-attaches to, with the number of their sealed pages."""
    device_lost: bool = False
    """The device and all that was on it are gone: no pool to attach to, weights to be read again."""
    last_step: frames.Step | None = None
    tokens: int = 0
    """Generated on this slot, over all incarnations."""
    tokens_per_s: float = 0.0
    last_drawn: float = 0.0

    def drew(self, now: float, tokens: int) -> None:
        """Count a step's tokens; the rate is smoothed over about a second of real time."""
        self.tokens += tokens
        elapsed = max(1e-4, now - self.last_drawn)
        self.last_drawn = now
        weight = min(1.0, elapsed)
        self.tokens_per_s += weight * (tokens / elapsed - self.tokens_per_s)

    def close(self) -> None:
        """Give the pool back."""
        if self.link is not None:
            self.link.close()
            self.link = None
        if self.pool_fd >= 0:
            os.close(self.pool_fd)
            self.pool_fd = -1
