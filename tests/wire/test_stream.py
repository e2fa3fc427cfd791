"""Bytes to messages: whatever the socket cuts, the same messages; a torn one never happened."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumenbox.wire.stream import HEADER, MAX_MESSAGE, Splitter, pack

MESSAGES = [b"", b"a", b"\x00\x00\x00\x00", b"x" * 300]
WIRE = b"".join(map(pack, MESSAGES))


@pytest.mark.parametrize("offset", range(len(WIRE) + 1))
def test_a_cut_at_every_byte_offset(offset: int) -> None:
    splitter = Splitter()
    assert splitter.feed(WIRE[:offset]) + splitter.feed(memoryview(WIRE)[offset:]) == MESSAGES


@pytest.mark.parametrize("end", range(len(WIRE)))
def test_a_torn_message_at_the_end_is_not_told(end: int) -> None:
    whole = Splitter().feed(WIRE[:end])
    assert whole == MESSAGES[: len(whole)]
    assert len(whole) < len(MESSAGES)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=50), max_size=8), st.lists(st.integers(1, 30), max_size=40))
def test_any_cuts_give_the_same_messages(messages: list[bytes], lengths: list[int]) -> None:
    wire, splitter, found = b"".join(map(pack, messages)), Splitter(), []
    for length in lengths:
        found += splitter.feed(wire[:length])
        wire = wire[length:]
    assert found + splitter.feed(wire) == messages


def test_byte_by_byte() -> None:
    splitter = Splitter()
    assert [message for byte in WIRE for message in splitter.feed(bytes([byte]))] == MESSAGES


def test_what_is_whole_before_an_absurd_length_is_handed_over() -> None:
    splitter = Splitter()
    assert splitter.feed(pack(b"a") + HEADER.pack(MAX_MESSAGE + 1)) == [b"a"]
    with pytest.raises(ValueError, match="a message of"):
        splitter.feed(b"")


def test_an_absurd_length_is_refused_before_its_bytes_come() -> None:
    with pytest.raises(ValueError, match="a message of"):
        Splitter().feed(HEADER.pack(MAX_MESSAGE + 1))
    assert Splitter().feed(HEADER.pack(MAX_MESSAGE)) == []
