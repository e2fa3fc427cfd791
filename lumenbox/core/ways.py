"""The vocabulary of recovery: what a strategy decides on, and what it answers with."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from lumenbox.core.cost import Shape
from lumenbox.core.events import Interrupted
from lumenbox.core.state import CoreState, KvCheckpoint, Worker


class Case(msgspec.Struct, frozen=True):
    """What a strategy decides on: the state, whose requests go on elsewhere, who can take over, and whether the pool
    can be attached to by the next incarnation, which is `rebirth_s` away (infinite if there will be none)."""

    state: CoreState
    dead: Worker
    survivors: list[Worker]
    can_reattach: bool
    rebirth_s: float = float("inf")

    def checkpoint(self, req: int) -> KvCheckpoint | None:
        """Its KV checkpoint, if pages of it are sealed."""
        checkpoint = self.state.arena.checkpoints.get(req)
        return checkpoint if checkpoint is not None and checkpoint.sealed else None

    def saved_tokens(self, req: int) -> int:
        """Tokens whose KV a restore would load."""
        checkpoint = self.state.arena.checkpoints.get(req)
        return checkpoint.sealed * self.state.config.page_size if checkpoint is not None else 0

    def sent_to(self, req: int, heir: int) -> Way:
        """The way to a survivor: restored if pages of it are sealed, else computed again."""
        return Way("restore" if self.checkpoint(req) is not None else "recompute", heir)

    def reattach_s(self, lost: Interrupted) -> float:
        """reattach = remaining birth-to-first-step + step."""
        shape = Shape(len(self.dead.requests), max(0, lost.tokens - lost.computed - 1), lost.tokens)
        return self.state.birth_s + self.state.model.seconds(shape)


class Way(msgspec.Struct, frozen=True):
    """`reattach` (heir: the next life), `restore`, `recompute` (heir: a survivor), `hold` (nobody yet) or `end`."""

    way: str
    heir: int = -1


Plan = dict[int, Way]
"""The way of each interrupted request; heirs execute theirs in this order."""
Routing = Callable[[Case, list[Interrupted]], Plan]
