"""What can go wrong, one small function a kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lumenbox.core import events as e
from lumenbox.sim.scenario import Fault
from lumenbox.sim.shell import Link, Shell, Slot


def perform(shell: Shell, fault: Fault) -> None:
    """Make it happen."""
    shell.history.append((shell.clock.now, fault))
    KINDS[fault.kind](shell, fault)


def calm(shell: Shell) -> None:
    """The faults are over: nobody is doomed, what is stopped goes on. What hangs or crawls is for the box to notice."""
    for slot in shell.slots:
        slot.dooms.clear()
        if slot.link is not None:
            slot.link.process.doom = ""
            slot.link.process.thaw()


def _slot(shell: Shell, fault: Fault) -> Slot:
    """The slot to be hurt: the one named, or the one with the most to do."""
    if fault.worker >= 0:
        return shell.slots[fault.worker]
    return min(shell.slots, key=lambda slot: (-len(shell.core.state.workers[slot.worker].requests), slot.worker))


def _link(shell: Shell, fault: Fault) -> Link | None:
    """The incarnation to be hurt, if one lives."""
    link = _slot(shell, fault).link
    return link if link is not None and link.process.alive else None


def _kill(shell: Shell, fault: Fault) -> None:
    if (link := _link(shell, fault)) is not None:
        link.process.die("killed")


def _doom(shell: Shell, fault: Fault) -> None:
    """It dies when it next passes the point."""
    if (link := _link(shell, fault)) is not None:
        link.process.doom = fault.point


def _crash(shell: Shell, fault: Fault) -> None:
    if (link := _link(shell, fault)) is not None:
        link.process.die("crash" if fault.amount < 0.5 else "exit")


def _hang(shell: Shell, fault: Fault) -> None:
    if (link := _link(shell, fault)) is not None:
        link.process.hangs = True
        link.disturbed = fault.amount < 0.5


def _stop(shell: Shell, fault: Fault) -> None:
    """SIGSTOP, for a moment or for good."""
    if (link := _link(shell, fault)) is not None:
        link.process.frozen = True
        shell.clock.after(3.0 * fault.amount**3, link.process.thaw)


def _slow(shell: Shell, fault: Fault) -> None:
    if (link := _link(shell, fault)) is not None:
        link.process.slow_factor = 3.0 + 20.0 * fault.amount


def _lose(shell: Shell, fault: Fault) -> None:
    """The device falls off, and its memory with it."""
    if (link := _link(shell, fault)) is not None:
        _slot(shell, fault).device_lost = True
        link.process.die("killed")


def _corrupt(shell: Shell, fault: Fault) -> None:
    """Damage sealed pages of the requests that a worker serves, all or some; mostly it dies soon, before new ones."""
    kept = shell.core.state.arena.checkpoints
    served = [kept[rid] for rid in shell.core.state.workers[_slot(shell, fault).worker].requests if rid in kept]
    for slot in (slot for cp in served for page in cp.slots[: cp.sealed] for slot in page):
        if fault.amount < 0.5 or shell.noise.random() < 0.3:
            shell.arena.corrupt(slot)
    if fault.amount > 0.2:
        link = _link(shell, fault)
        shell.clock.after(0.1 * shell.noise.random(), lambda: link.process.die("killed") if link is not None else None)


def _several(shell: Shell, fault: Fault) -> None:
    for slot in shell.slots:
        if slot.link is not None and shell.noise.random() < fault.amount:
            slot.link.process.die("killed" if shell.noise.random() < 0.8 else "crash")


def _everyone(shell: Shell, fault: Fault) -> None:
    for slot in shell.slots:
        if slot.link is not None:
            slot.link.process.die("killed")


def _fork_server(shell: Shell, fault: Fault) -> None:
    shell.fork_server_dies()


def _reborn(shell: Shell, fault: Fault) -> None:
    """Killed, and its next incarnation too, on its way back."""
    _slot(shell, fault).dooms.append(fault.point)
    _kill(shell, fault)


def _stillborn(shell: Shell, fault: Fault) -> None:
    """Killed, and its next incarnations end themselves before they are ready."""
    deaths = 1 + int(3 * fault.amount)
    _slot(shell, fault).dooms.extend(["crash" if fault.amount < 0.5 else "exit"] * deaths)
    _kill(shell, fault)


def _unspawnable(shell: Shell, fault: Fault) -> None:
    _slot(shell, fault).dooms.append("unspawnable")
    _kill(shell, fault)


def _pause(shell: Shell, fault: Fault) -> None:
    shell.pause(2.0 * fault.amount**2)


def _deserted(shell: Shell, fault: Fault) -> None:
    """Killed, and some of the clients leave while their requests are on their way back."""
    _kill(shell, fault)
    for group in shell.groups():
        if shell.noise.random() < 0.4:
            shell.soon(shell.noise.uniform(0.0, 0.2), partial(shell.abandon, group))


def _upgrade(shell: Shell, fault: Fault) -> None:
    """New code; sometimes of another identity, so that the pool is of no use to it."""
    if fault.amount < 0.3:
        slot = _slot(shell, fault)
        slot.device_lost = True
        slot.next_identity += 1
    _ask(shell, fault)


def _ask(shell: Shell, fault: Fault) -> None:
    shell.soon(0.0, partial(ask, shell, fault.kind, _slot(shell, fault).worker))


def ask(shell: Shell, verb: str, worker: int) -> None:
    """An operator's wish."""
    shell.tell(e.OperatorAsked(shell.clock.now, verb, worker))


KINDS: dict[str, Callable[[Shell, Fault], None]] = {
    "kill": _kill, "doom": _doom, "crash": _crash, "hang": _hang, "stop": _stop, "slow": _slow, "lose": _lose,
    "several": _several, "everyone": _everyone, "fork_server": _fork_server, "reborn": _reborn,
    "stillborn": _stillborn, "unspawnable": _unspawnable, "pause": _pause, "corrupt": _corrupt,
    "deserted": _deserted, "drain": _ask, "resume": _ask, "restart": _ask, "upgrade": _upgrade, "shutdown": _ask,
}  # fmt: skip
