"""One worker slot as the shell sees it: what outlives the incarnations (pool, mirror), and the one that lives now."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field

from lumenbox.coordinator.figures import Meter
from lumenbox.coordinator.link import WorkerLink
from lumenbox.core.mirror import PoolMirror
from lumenbox.wire import frames


@dataclass(slots=True)
class Slot:
    """Owner of the slot's KV-pool descriptor."""

    worker: int
    pool_fd: int = -1
    pool_bytes: int = 0
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
    last_frame: frames.Step | None = None
    step_s: float = 0.0
    """What its last step took."""
    drawn: Meter = field(default_factory=Meter)
    """Tokens generated on this slot, over all incarnations."""
    sealed: Meter = field(default_factory=Meter)
    """Bytes of KV checkpoints that were written on its budget as a holder, by whatever worker."""
    restored_bytes: int = 0
    """Bytes that were loaded from its budget."""
    restoring_s: float = 0.0
    """Seconds that their loading took."""

    def close(self) -> None:
        """Give the pool back."""
        if self.link is not None:
            self.link.close()
            self.link = None
        if self.pool_fd >= 0:
            os.close(self.pool_fd)
            self.pool_fd = -1
