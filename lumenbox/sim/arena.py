"""The simulated arena: pages in slots that outlive every worker, and the coordinator's records of them.

Like `coordinator/arena.py` and `memory/arena.py`. A copy takes its time: between its two halves a slot is torn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

Writer = tuple[int, int, int]
"""(worker, request, epoch)"""
NOTHING = -1


def checksum(page: Sequence[int]) -> int:
    """Stands for crc32: other content has another one."""
    return hash(tuple(page)) | 1 << 64


class Arena:
    """What lies in the slots. `may_write(writer, index, slot)` asserts that the core has reserved it for the writer."""

    def __init__(self, page_size: int, noise: random.Random, may_write: Callable[[Writer, int, int], None]) -> None:
        self._size, self._noise, self._may_write = page_size, noise, may_write
        self._pages: dict[int, list[int]] = {}
        self._writers: dict[int, Writer] = {}
        self.spoiled: set[int] = set()
        """Slots that chaos has damaged since they were written."""

    def begin(self, writer: Writer, index: int, slots: Sequence[int], page: Sequence[int]) -> None:
        """The first half of a copy is there, the rest is whatever it is."""
        half = self._size // 2
        for slot in slots:
            self._may_write(writer, index, slot)
            assert slot not in self._writers, f"slot {slot} is written by {self._writers[slot]} and {writer}"
            self._writers[slot] = writer
            rest = [self._noise.getrandbits(60) for _ in range(self._size - half)]
            self._pages[slot] = [*page[:half], *rest]

    def end(self, writer: Writer, index: int, slots: Sequence[int], page: Sequence[int]) -> None:
        """The second half."""
        half = self._size // 2
        for slot in slots:
            self._may_write(writer, index, slot)
            del self._writers[slot]
            self.spoiled.discard(slot)
            self._pages[slot][half:] = page[half:]

    def abandon(self, worker: int) -> None:
        """It died: what it was writing stays torn."""
        for slot in [slot for slot, writer in self._writers.items() if writer[0] == worker]:
            del self._writers[slot]

    def read(self, slot: int) -> list[int]:
        """A slot's content."""
        return self._pages.get(slot, [NOTHING] * self._size)

    def corrupt(self, slot: int) -> None:
        """Damage one value (chaos)."""
        if slot in self._pages:
            self._pages[slot][self._noise.randrange(self._size)] = self._noise.getrandbits(60)
            self.spoiled.add(slot)


class Records:
    """No record, no page. `whole` is how many first pages of a request nothing speaks against: the core may trust no
    more than that."""

    def __init__(self) -> None:
        self._records: dict[int, tuple[int, int]] = {}
        self.whole: dict[int, int] = {}

    def enter(self, rid: int, index: int, slots: tuple[int, ...], crc: int, identity: int) -> None:
        """A page became whole in these slots; pages of a request do so in their order."""
        assert index <= self.whole.get(rid, 0), f"page {index} of request {rid} is sealed before the one before it"
        self.whole[rid] = max(self.whole.get(rid, 0), index + 1)
        for slot in slots:
            self._records[slot] = (crc, identity)

    def checksums(self, slots: Sequence[tuple[int, ...]], identity: int) -> list[int]:
        """Of the leading pages that are whole and were computed in the same way."""
        found: list[int] = []
        for page in slots:
            records = {self._records.get(slot) for slot in page}
            (record,) = records if len(records) == 1 else (None,)
            if record is None or record[1] != identity:
                break
            found.append(record[0])
        return found
