"""The checkpoint arena: KV pages in host memory, in slots of one page, that outlive every worker.

Written and read with positioned file I/O, so that a worker maps none of it and dies fast (FACTS: death and memory). The
same code serves a file. A page's payload comes first, its record (with this checksum) rides in a later frame: what has
no record does not exist.
"""

from __future__ import annotations

import os
import zlib


class Arena:
    """A descriptor and the size of its slots. The descriptor belongs to whoever made the arena."""

    def __init__(self, fd: int, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self._fd = fd

    def write(self, slot: int, page: memoryview) -> int:
        """Store a page; returns its crc32."""
        assert len(page) == self.page_bytes
        written = 0
        while written < len(page):
            written += os.pwrite(self._fd, page[written:], slot * self.page_bytes + written)
        return zlib.crc32(page)

    def read(self, slot: int, page: memoryview) -> int:
        """Fetch a page into `page`; returns the crc32 of what came, -1 (which fits nothing) beyond the end."""
        got = 0
        while got < len(page):
            count = os.preadv(self._fd, [page[got:]], slot * self.page_bytes + got)
            if count == 0:
                return -1
            got += count
        return zlib.crc32(page)

    def flip_byte(self, slot: int) -> None:
        """Damage a stored page (chaos); raises OSError if it did not take hold."""
        place = slot * self.page_bytes + self.page_bytes // 2
        byte = os.pread(self._fd, 1, place)[0] ^ 0xFF
        os.pwrite(self._fd, bytes([byte]), place)
        if os.pread(self._fd, 1, place)[0] != byte:
            raise OSError("the page did not change")
