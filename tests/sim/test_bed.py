"""The test bed itself: it repeats, and it can fail. Each mutant is a mistake that engines with recovery make."""

from collections import deque
from collections.abc import Callable, Iterable

import msgspec
import pytest

from lumenbox.core.batching import BatchScheduler
from lumenbox.core.commands import Changed
from lumenbox.core.ledger import Ledger
from lumenbox.core.machine import Core
from lumenbox.core.mirror import PoolMirror
from lumenbox.core.pages import PagePool
from lumenbox.core.requests import SamplingParams
from lumenbox.core.state import CoreConfig
from lumenbox.sim.scenario import Call, Fault, Scenario, scenario
from lumenbox.sim.world import SimulationFailed, World, run

ENOUGH_SEEDS = 300


def give_back_at_once(pool: PagePool, pages: Iterable[int]) -> None:
    pages = list(pages)
    give_back(pool, pages)
    pool._free += pool._limbo
    pool._limbo.clear()


def any_epoch(ledger: Ledger, rid: int, epoch: int, *rest: object) -> object:
    entry = ledger.entries.get(rid)
    return extend(ledger, rid, entry.epoch if entry else epoch, *rest)


def newest_counted(mirror: PoolMirror, rid: int, num_tokens: int) -> None:
    if rid in mirror.computed:
        mirror.computed[rid] = num_tokens


give_back, extend = PagePool.give_back, Ledger.extend
MUTANTS: dict[str, tuple[type, str, Callable[..., object]]] = {
    "a page is free at once": (PagePool, "give_back", give_back_at_once),
    "tokens of any epoch": (Ledger, "extend", any_epoch),
    "pages not released": (PoolMirror, "release", lambda mirror, rid: None),
    "the newest token has KV": (PoolMirror, "sampled", newest_counted),
    "the dead pool's mirror is kept": (PoolMirror, "clear", lambda mirror: None),
    "hangs are not noticed": (Core, "_overdue", lambda core, event: None),
    "nobody is cancelled": (Core, "_client_gone", lambda core, event: core._forget(event.req)),
    "held requests are forgotten": (Core, "_place_held", lambda core: None),
    "twins wait for ever": (BatchScheduler, "_computed", lambda scheduler, page_hash: None),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_caught(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, mistake = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, mistake)
    with pytest.raises(SimulationFailed, match=r"python -m lumenbox\.sim \d+"):
        for seed in range(ENOUGH_SEEDS):
            run(seed)


def test_same_seed_same_history() -> None:
    worlds = [World(scenario(7)) for _ in range(2)]
    for world in worlds:
        world.shell.history = deque()
        world.run()
    assert worlds[0].shell.history == worlds[1].shell.history


def test_gray_worker_is_replaced_while_its_peers_have_nothing_to_do() -> None:
    """Its own steps, the only ones then, do not become the measure of all things."""
    params = SamplingParams(max_tokens=150)
    calls = [
        Call(
            0.5 + at / 10, [[1 + at, 2, 3]], 1, msgspec.structs.replace(params, seed=at), (), False, 0, float("inf"), ""
        )
        for at in range(8)
    ]
    box = CoreConfig(workers=3, page_size=8, max_queue=100, max_model_len=200, recovery="box", respawn=True)
    slow = Fault(0.6, "slow", 0, 0.3, "")
    world = World(Scenario(1, box, 200, 8, 64, 0.01, 0.0005, 0.1, 1.0, calls, [slow]))
    world.shell.history = deque()
    assert world.run()["finished"] == 8
    assert Changed(0, "suspect", "slow") in [what for _, what in world.shell.history]
