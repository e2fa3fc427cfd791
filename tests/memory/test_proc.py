"""What /proc says: odd names, every state, threads that vanish while one looks, and a child killed for real."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from children import child, said

from lumenbox.memory import proc
from lumenbox.memory.proc import PF_EXITING, TaskStat, parse_stat, runs_no_user_code, task_stats, waited_ns


def line(name: bytes = b"python", state: str = "S", flags: int = 0, exit_code: int = 0) -> bytes:
    """As proc_pid_stat(5) has it: 52 fields, the second in parentheses."""
    fields = [state, 1, 2, 3, 0, -1, flags, *range(10, 52), exit_code]
    return b"4242 (" + name + b") " + " ".join(map(str, fields)).encode() + b"\n"


@pytest.mark.parametrize(
    "name", [b"python", b"a b", b"a) S 1", b"((", b") R (", b"", b"\xff\xfe", b"x\ny", b"1 (2) Z 3"]
)
def test_a_name_may_hold_anything(name: bytes) -> None:
    assert parse_stat(line(name, "R", 0x400000, 9)) == TaskStat("R", False, 9)


@pytest.mark.parametrize("state", "RSDTtI")
def test_an_exiting_thread_shows_by_its_flag_in_any_state(state: str) -> None:
    assert parse_stat(line(state=state, flags=0x400040 | PF_EXITING)).exiting
    assert not parse_stat(line(state=state, flags=0x400040)).exiting


@pytest.mark.parametrize("state", "ZX")
def test_zombies_and_dead_are_exiting_whatever_their_flags(state: str) -> None:
    assert parse_stat(line(state=state)).exiting


def test_our_own_line_is_that_of_a_running_thread() -> None:
    assert parse_stat(Path("/proc/thread-self/stat").read_bytes()) == TaskStat("R", False, 0)


def test_all_threads_are_seen() -> None:
    done = threading.Event()
    threads = [threading.Thread(target=done.wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert len(task_stats(os.getpid())) >= 4
        assert not runs_no_user_code(os.getpid())
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_a_thread_that_vanishes_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listing names a thread that is gone when its file is opened; those after it still run."""
    listing = os.listdir

    def with_a_ghost_first(path: str) -> list[str]:
        return ["999999999", *listing(path)]

    monkeypatch.setattr(proc.os, "listdir", with_a_ghost_first)
    assert task_stats(os.getpid())
    assert not runs_no_user_code(os.getpid())


def test_a_process_that_never_was_runs_nothing() -> None:
    assert task_stats(999_999_999) == []
    assert runs_no_user_code(999_999_999)


THREE_THREADS = """
import threading
for _ in range(2):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print("ready", flush=True)
input()
"""


def test_a_killed_child_runs_no_user_code_before_it_is_reaped() -> None:
    with child(THREE_THREADS) as process:
        assert said(process) == "ready"
        assert not runs_no_user_code(process.pid)
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert runs_no_user_code(process.pid)
        (stat,) = task_stats(process.pid)
        assert (stat.state, stat.exiting) == ("Z", True)
        assert os.waitstatus_to_exitcode(stat.exit_code) == -signal.SIGKILL
        process.wait()
        assert runs_no_user_code(process.pid)


def test_a_stopped_child_is_alive() -> None:
    with child(THREE_THREADS) as process:
        said(process)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert {stat.state for stat in task_stats(process.pid)} == {"T"}
        assert not runs_no_user_code(process.pid)


def test_the_time_spent_waiting_for_a_core_is_told_or_zero() -> None:
    assert waited_ns(os.getpid(), threading.get_native_id()) >= 0
    assert waited_ns(os.getpid(), 999_999_999) == 0
