"""How the requests of a dead worker go on: strategies by name (DESIGN §7).

A strategy is a placement of KV checkpoints and a routing; a part that was named on its own replaces the strategy's.
"""

from __future__ import annotations

from lumenbox.core.box import by_cost
from lumenbox.core.events import Interrupted
from lumenbox.core.rerouting import holder, least_loaded, locality_aware
from lumenbox.core.state import PARTS
from lumenbox.core.ways import Case, Plan, Routing, Way

__all__ = ["ROUTINGS", "STRATEGIES", "Case", "Plan", "Way", "in_order", "none", "plan"]

LAST = float("inf")

ROUTINGS: dict[str, Routing] = {
    "holder": holder,
    "locality-aware": locality_aware,
    "least-loaded": least_loaded,
    "cost": by_cost,
}


def none(case: Case, interrupted: list[Interrupted]) -> Plan:
    """Every stream ends with an error."""
    return {lost.req: Way("end") for lost in interrupted}


STRATEGIES: dict[str, Routing] = {"none": none} | {
    name: ROUTINGS[routing] for name, (_, routing) in PARTS.items() if name != "none"
}


def plan(case: Case, interrupted: list[Interrupted]) -> Plan:
    """The way of each by the box's own strategy, in the order in which heirs execute."""
    config = case.state.config
    ways = none(case, interrupted) if config.recovery == "none" else ROUTINGS[config.routing](case, interrupted)
    return in_order(case, ways)


def in_order(case: Case, ways: Plan) -> Plan:
    """Restores first, the shortest before the longer; what is computed again keeps the strategy's order."""
    tokens = case.saved_tokens
    return dict(sorted(ways.items(), key=lambda item: tokens(item[0]) if item[1].way == "restore" else LAST))
