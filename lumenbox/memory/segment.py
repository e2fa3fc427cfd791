"""Anonymous shared memory: a memfd lives while any descriptor or mapping of it does, has no name, and leaves nothing.

Allocation is eager (`fallocate`), so that a box that does not fit says so at start and never dies of SIGBUS.
"""

from __future__ import annotations

import mmap
import os

from lumenbox.errors import StartupError


def create(name: str, size: int) -> int:
    """Return a close-on-exec descriptor of `size` bytes of zeroed, allocated shared memory.

    `name` shows in /proc/PID/maps and means nothing else. Raises StartupError when the memory is not to be had.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        os.close(fd)
        raise StartupError(f"cannot allocate {size / 2**20:.0f} MiB for {name}: {error.strerror}") from error
    return fd


def attach(fd: int) -> mmap.mmap:
    """Map a whole segment, shared and writable. The descriptor may be closed afterwards."""
    return mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
