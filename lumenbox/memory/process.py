"""How a child of lumenbox is born: it dies with its parent, holds no descriptor by accident, and goes first when
memory runs out."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_OOM_SCORE_ADJ = 500


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that forked it ends; leave at once if it is gone already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(0)


def close_all_but(keep: set[int]) -> None:
    """Close every descriptor above stderr that is not in `keep`, then check that it is so."""
    for fd in _open_descriptors() - keep:
        try:
            os.close(fd)
        except OSError:
            pass  # the listing's own descriptor
    assert _open_descriptors() <= keep, "a descriptor was inherited"


def go_first_when_memory_ends() -> None:
    """Make the kernel's out-of-memory killer prefer this process to the coordinator."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(_OOM_SCORE_ADJ))


def _open_descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and os.path.exists(f"/proc/self/fd/{fd}"):
            found.add(fd)
    return found
