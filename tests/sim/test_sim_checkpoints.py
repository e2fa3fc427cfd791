"""KV checkpoints in the virtual shell: restores where they must be, and mistakes that must be caught."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from lumenbox.core import commands as c
from lumenbox.core import events as e
from lumenbox.core.checkpoints import Checkpoints
from lumenbox.core.state import CheckpointConfig
from lumenbox.sim.checkpoints import KvCheckpoints
from lumenbox.sim.scenario import CopyTimes, Fault, Scenario, scenario
from lumenbox.sim.world import SimulationFailed, World, run

ENOUGH_SEEDS = 300


def calm(seed: int, recovery: str) -> Scenario:
    """Room everywhere, and one worker whose device is lost while it works."""
    plan = scenario(seed)
    core = msgspec.structs.replace(
        plan.core, workers=3, recovery=recovery, max_queue=100, checkpoints=CheckpointConfig(budget_pages=2000)
    )
    lost = Fault(random.Random(seed).uniform(0.5, 1.2), "lose", -1, 0.5, "")
    calls = [replace(call, poison="") for call in plan.calls]
    copying = CopyTimes(0.0005, 0.0001, 64)
    return replace(plan, core=core, num_pages=2000, max_num_seqs=8, calls=calls, faults=[lost], copying=copying)


@pytest.mark.parametrize("recovery", ("fixed", "lumen", "box"))
def test_sealed_pages_are_restored(recovery: str) -> None:
    """Whatever is sealed at a lossy death is not computed again: neither by another way, nor by less pages."""
    restored = 0
    for seed in range(40):
        world = World(calm(seed, recovery))
        world.shell.history = deque()
        world.run()
        size, given = world.scenario.core.page_size, dict[tuple[int, int], int]()
        ahead: dict[tuple[int, int], int] = {}
        for _, what in world.shell.history:
            if isinstance(what, c.Assign):
                assert what.way == "restore" or not what.sealed
                if what.way == "restore":
                    given[what.req, what.epoch] = what.sealed
            elif isinstance(what, c.PreRestore):
                ahead[what.req, what.epoch] = len(what.slots)
            elif isinstance(what, e.RestoreDone):
                key = (what.req, what.epoch)
                assert what.pages == (given | ahead)[key], "a request is restored, or goes ahead, once an epoch"
                restored += key in given
            elif isinstance(what, e.Admitted) and (what.req, what.epoch) in given:
                assert what.cached >= (given[what.req, what.epoch] - 1) * size
    assert restored > 20


def recycled_at_once(checkpoints: Checkpoints, request: object, keep: int) -> None:
    drop(checkpoints, request, keep)
    for key in list(checkpoints._arena.unquiet):
        checkpoints._recycle(checkpoints._arena.unquiet.pop(key))


def never_lowered(checkpoints: Checkpoints, event: e.RestoreDone) -> None:
    checkpoint = checkpoints._arena.checkpoints.get(event.req)
    sealed = checkpoint.sealed if checkpoint is not None else 0
    restored(checkpoints, event)
    if checkpoint is not None:
        checkpoint.sealed = sealed


drop, restored = Checkpoints._drop, Checkpoints.restored
Mistakes = dict[str, list[tuple[type, str, Callable[..., object]]]]
MUTANTS: Mistakes = {
    "slots are recycled at once": [(Checkpoints, "_drop", recycled_at_once)],
    "checksums are not verified": [(KvCheckpoints, "_verified", lambda kv, page, crc: True)],
    "bad pages stay sealed": [(Checkpoints, "restored", never_lowered)],
    "copies go on after the end": [(KvCheckpoints, "forget", lambda kv, scheduler, rid: None)],
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_caught(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name, mistake in MUTANTS[mutant]:
        monkeypatch.setattr(owner, name, mistake)
    with pytest.raises(SimulationFailed, match=r"python -m lumenbox\.sim \d+"):
        for seed in range(ENOUGH_SEEDS):
            run(seed)
