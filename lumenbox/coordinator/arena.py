"""The coordinator's end of the arena: owner of its memory, and of the records that make a stored page exist."""

from __future__ import annotations

import os

from lumenbox.config import BoxConfig
from lumenbox.memory import segment, sizing
from lumenbox.memory.arena import Arena
from lumenbox.memory.layout import LoadReport

DEFAULT_CONTEXT = 1024
"""Tokens that a live request is taken to hold, on average, when nobody says how large the budget is to be."""
DEFAULT_SHARE = 8
"""The default budget of all holders together is at most this fraction of the memory that is free."""


def budget_pages(config: BoxConfig, report: LoadReport) -> int:
    """Pages of each holder's budget: as asked for, else enough for the live context, bounded by what is free."""
    if config.checkpoints.placement in ("", "none"):
        return 0
    if config.checkpoint_bytes is not None:
        return config.checkpoint_bytes // report.page.page_bytes
    live = config.max_num_seqs * -(-DEFAULT_CONTEXT // config.page_size)
    free = sizing.available_bytes() // DEFAULT_SHARE // config.workers
    return min(live, free // report.page.page_bytes)


class ArenaStore:
    """Slots of one page each. A record is (checksum, identity of what computed the page); no record, no page."""

    def __init__(self) -> None:
        self.fd = -1
        self.num_slots = 0
        self._records: dict[int, tuple[int, str]] = {}
        self._arena: Arena | None = None

    def allocate(self, num_slots: int, page_bytes: int) -> None:
        """Take the memory. Raises StartupError when it is not to be had."""
        sizing.require(num_slots * page_bytes, "the KV checkpoints", "lower --checkpoint-budget or --workers")
        self.fd = segment.create("lumenbox-arena", max(1, num_slots * page_bytes))
        self.num_slots = num_slots
        self._arena = Arena(self.fd, page_bytes)

    def close(self) -> None:
        """Give the memory back, once every worker has too."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def enter(self, slots: tuple[int, ...], crc: int, identity: str) -> None:
        """A page became whole in these slots."""
        for slot in slots:
            self._records[slot] = (crc, identity)

    def checksums(self, slots: list[tuple[int, ...]], identity: str) -> list[int]:
        """Checksums of the leading pages that are whole and were computed in the same way."""
        found: list[int] = []
        for page in slots:
            records = {self._records.get(slot) for slot in page}
            (record,) = records if len(records) == 1 else (None,)
            if record is None or record[1] != identity:
                break
            found.append(record[0])
        return found

    def corrupt(self, slots: list[tuple[int, ...]]) -> int:
        """Flip a byte in each of these pages (chaos); returns how many changed."""
        assert self._arena is not None
        for slot in (slot for page in slots for slot in page):
            self._arena.flip_byte(slot)
        return len(slots)
