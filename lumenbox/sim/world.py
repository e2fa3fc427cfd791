"""One seed, from the first event to rest: the box comes up, is loaded and hurt, and must become whole again."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

from lumenbox.core.state import WorkerPhase
from lumenbox.sim import faults
from lumenbox.sim.clock import Clock
from lumenbox.sim.scenario import SPAN_S, Scenario, scenario
from lumenbox.sim.shell import LOOK_S, Shell

WHOLE_WITHIN_S = 200.0
"""Virtual seconds until the box must be whole: some deadlines (an unknown step, a birth) are a minute."""


class SimulationFailed(Exception):
    """An invariant broke. The message tells the seed, what led to it, and how to see it again."""

    def __init__(self, world: World, why: BaseException) -> None:
        lines = [f"{now:9.4f}  {what}" for now, what in world.shell.history]
        story = "\n".join([f"{world.scenario.core}", *lines, f"{type(why).__name__}: {why}"])
        super().__init__(f"{story}\nrepeat it: python -m lumenbox.sim {world.scenario.seed}")


class World:
    """Make it from a scenario, `run` it once."""

    def __init__(self, plan: Scenario) -> None:
        self.scenario = plan
        self.clock = Clock()
        self.shell = Shell(plan, self.clock, random.Random(-1 - plan.seed))
        self._at_rest = False

    def run(self) -> Counter[str]:
        """Run to rest; returns how requests ended, and how many core events it took. Raises SimulationFailed."""
        shell = self.shell
        for call in self.scenario.calls:
            self.clock.at(call.at, partial(shell.soon, 0.0, partial(shell.call, call)))
        for fault in self.scenario.faults:
            self.clock.at(fault.at, partial(faults.perform, shell, fault))
        self.clock.at(SPAN_S + 0.01, partial(faults.calm, shell))
        shell.soon(LOOK_S, self._look)
        try:
            while not self._at_rest and shell.exited is None:
                self.clock.step()
            self._check_end()
        except Exception as why:
            raise SimulationFailed(self, why) from why
        ends = Counter(client.end for client in shell.oracle.clients.values())
        return ends + Counter(events=shell.events_told)

    def _look(self) -> None:
        """The monitor's period; after the last fault also: is the box whole?"""
        if self.clock.now > SPAN_S + 0.01:
            for worker in self.shell.core.state.workers.values():
                if worker.phase == WorkerPhase.DRAINED:
                    faults.ask(self.shell, "resume", worker.id)
            self._at_rest = self.shell.is_whole()
            assert self.clock.now < WHOLE_WITHIN_S, "the box does not become whole"
        self.shell.look()
        self.shell.soon(LOOK_S, self._look)

    def _check_end(self) -> None:
        shell = self.shell
        shell.check_twin()
        if shell.exited is not None:
            phases = {worker.phase for worker in shell.core.state.workers.values()}
            assert phases == {WorkerPhase.QUARANTINED}, "the box ended with workers left"
            assert not shell.core.state.requests, "the box ended before its requests"
        shell.check_rest()


def run(seed: int) -> Counter[str]:
    """Run one seed."""
    return World(scenario(seed)).run()
