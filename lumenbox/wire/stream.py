"""Length-prefixed messages: four bytes, little endian, then msgpack. A torn one at the end never happened."""

from __future__ import annotations

import struct

HEADER = struct.Struct("<I")
MAX_MESSAGE = 256 << 20
"""Bytes; far above any real message, so a larger length is garbage, not a long message."""


def pack(payload: bytes) -> bytes:
    """Frame one message."""
    return HEADER.pack(len(payload)) + payload


class Splitter:
    """Cuts a byte stream into whole messages."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """Add bytes; return the messages that are whole now. Raises ValueError on an absurd length, once it has handed
        over what is whole before it: feed nothing to hear of it."""
        self._buffer += data
        messages: list[bytes] = []
        position = 0
        while len(self._buffer) - position >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer, position)
            if length > MAX_MESSAGE and messages:
                break
            if length > MAX_MESSAGE:
                raise ValueError(f"a message of {length} bytes")
            if len(self._buffer) - position < HEADER.size + length:
                break
            position += HEADER.size
            messages.append(bytes(self._buffer[position : position + length]))
            position += length
        del self._buffer[:position]
        return messages
