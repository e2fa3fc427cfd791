"""How children are born, tried on real ones."""

from __future__ import annotations

import os
import signal

from children import child, said

GRANDCHILD = """
import os, sys
from lumenbox.memory import process
parent = os.getpid()
if os.fork() == 0:
    process.die_with_parent(parent)
    print(os.getpid(), flush=True)
    while True:
        os.read(int(sys.argv[1]), 1)
input()
"""


def test_a_child_dies_with_its_parent() -> None:
    """The pipe that both write to ends only when neither holds it any more."""
    kept, given = os.pipe()
    with child(GRANDCHILD, kept, pass_fds=[kept]) as process:
        grandchild = int(said(process))
        os.kill(grandchild, 0)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert said(process) == ""
    os.close(kept)
    os.close(given)


ORPHAN = """
import os
from lumenbox.memory import process
process.die_with_parent(os.getppid() + 1)
print("still here", flush=True)
"""


def test_a_child_whose_parent_is_gone_already_leaves_at_once() -> None:
    with child(ORPHAN) as process:
        assert said(process) == ""
        assert process.wait() == 0


CLEAN = """
import os, sys
from lumenbox.memory import process
kept, *rest = os.pipe() + os.pipe()
inherited = int(sys.argv[1])
os.dup2(rest[0], 300)
process.close_all_but({kept})
def is_open(fd):
    try:
        return bool(os.fstat(fd))
    except OSError:
        return False
print([fd for fd in (0, 1, 2, kept, inherited, *rest, 300) if is_open(fd)] == [0, 1, 2, kept], flush=True)
"""


def test_only_what_is_meant_to_be_kept_stays_open() -> None:
    kept, given = os.pipe()
    with child(CLEAN, given, pass_fds=[given]) as process:
        assert said(process) == "True"
    os.close(kept)
    os.close(given)


def test_a_worker_goes_before_its_coordinator_when_memory_ends() -> None:
    code = """
from lumenbox.memory import process
process.go_first_when_memory_ends()
print(open("/proc/self/oom_score_adj").read(), flush=True)
"""
    with child(code) as process:
        assert int(said(process)) > 0
