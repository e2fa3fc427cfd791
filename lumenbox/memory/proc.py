"""What /proc tells about a process: whether it can still run user code, whether it is stopped, how long it waited.

Fields and flags: proc_pid_stat(5), proc_pid_schedstat(5), include/linux/sched.h.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

PF_EXITING = 0x4
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STATE, _FLAGS, _EXIT_CODE = 0, 6, 49  # positions after the command name, which may hold spaces


@dataclass(slots=True, frozen=True)
class TaskStat:
    """One thread. `state` is the kernel's letter (R, S, D, T, Z, X…); `exit_code` a wait status, 0 while it runs."""

    state: str
    exiting: bool
    exit_code: int


def parse_stat(line: bytes) -> TaskStat:
    """Read a line of /proc/PID/stat."""
    fields = line.rpartition(b")")[2].split()
    state = fields[_STATE].decode()
    exiting = bool(int(fields[_FLAGS]) & PF_EXITING) or state in "ZX"
    return TaskStat(state, exiting, int(fields[_EXIT_CODE]))


def task_stats(pid: int) -> list[TaskStat]:
    """All threads of a process; empty once it is gone."""
    stats: list[TaskStat] = []
    try:
        tids = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return stats
    for tid in tids:
        try:
            with open(f"/proc/{pid}/task/{tid}/stat", "rb") as file:
                stats.append(parse_stat(file.read()))
        except (FileNotFoundError, ProcessLookupError):
            continue  # this thread is gone; the others may still run
    return stats


def runs_no_user_code(pid: int) -> bool:
    """Whether every thread is exiting, a zombie, or gone: nothing can be written by it any more."""
    return all(stat.exiting for stat in task_stats(pid))


def active_ns(pid: int) -> int:
    """Time that the threads which a process has now have spent on a core or waiting for one, summed."""
    total = 0
    try:
        for tid in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{tid}/schedstat", "rb") as file:
                ran, waited, _ = file.read().split()
            total += int(ran) + int(waited)
    except (OSError, ValueError):
        pass  # a thread, or the process, is gone; or the kernel does not tell
    return total


def stolen_s() -> list[float]:
    """Time that a hypervisor has kept each core from us (the steal column of /proc/stat): nobody here can use it."""
    with open("/proc/stat", "rb") as file:
        cores = [line.split() for line in file if line.startswith(b"cpu") and not line.startswith(b"cpu ")]
    return [int(core[8]) / _TICKS_PER_S for core in cores]


def waited_ns(pid: int, tid: int) -> int:
    """Time that a thread has spent runnable but waiting for a core; 0 where the kernel does not tell."""
    try:
        with open(f"/proc/{pid}/task/{tid}/schedstat", "rb") as file:
            return int(file.read().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
