"""Core events on disk, in segments that each open with a snapshot, so that any one of them replays by itself.

No token and no prompt text passes through the core, so none is here. Files are private (0600) and bounded in number
and size. Beside each event stands a checksum of the commands that answered it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from lumenbox.core.commands import AnyCommand
from lumenbox.core.events import AnyEvent
from lumenbox.core.machine import Core
from lumenbox.core.state import CoreState
from lumenbox.wire.stream import Splitter, pack

SEGMENT_BYTES = 4 << 20
SEGMENTS = 8


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One event and the crc32 of the encoded commands that the core answered with."""

    event: AnyEvent
    answer: int


_encode = msgspec.msgpack.Encoder().encode


def checksum(commands: list[AnyCommand]) -> int:
    """What is kept of an answer."""
    return zlib.crc32(_encode(commands))


class Journal:
    """Appends to the newest segment in `folder`; opens the next with a fresh snapshot when one is full."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)
        for old in folder.glob("*.journal"):
            old.unlink()
        self._number = 0
        self._size = SEGMENT_BYTES
        self._file: int | None = None
        self.failure: OSError | None = None
        """Why nothing is kept any more (a full disk): the box serves on without a journal."""

    def append(self, core: Core, event: AnyEvent) -> list[AnyCommand]:
        """Have the core handle the event, and keep both."""
        if self.failure is not None:
            return core.handle(event)
        try:
            if self._size >= SEGMENT_BYTES:
                self._open_segment(core.state)
        except OSError as error:
            self.failure = error
        commands = core.handle(event)
        try:
            self._write(_encode(Entry(event, checksum(commands))))
        except OSError as error:
            self.failure = error
        return commands

    def roll(self) -> None:
        """Open a new segment with the next event: the core's state changed otherwise than by one."""
        self._size = SEGMENT_BYTES

    def close(self) -> None:
        """Close the newest segment."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open_segment(self, state: CoreState) -> None:
        self.close()
        self._number += 1
        path = self._folder / f"{self._number:08d}.journal"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = 0
        self._write(_encode(state))
        (self._folder / f"{self._number - SEGMENTS:08d}.journal").unlink(missing_ok=True)

    def _write(self, payload: bytes) -> None:
        if self._file is None:
            return
        self._size += os.write(self._file, pack(payload))


def read_segment(path: Path) -> tuple[CoreState, list[Entry]]:
    """A segment's snapshot and entries; a torn last entry is dropped."""
    head, *rest = Splitter().feed(path.read_bytes())
    decode = msgspec.msgpack.Decoder(Entry).decode
    return msgspec.msgpack.decode(head, type=CoreState), [decode(message) for message in rest]


def replay(path: Path) -> Iterator[tuple[Entry, list[AnyCommand]]]:
    """Run a segment's events through a core that starts at its snapshot; yields each with what the core answers now."""
    state, entries = read_segment(path)
    core = Core(state=state)
    for entry in entries:
        yield entry, core.handle(entry.event)
