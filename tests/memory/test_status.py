"""The heartbeat: a reading is whole or it is none."""

from __future__ import annotations

import mmap
import struct

import pytest

from lumenbox.memory import status
from lumenbox.memory.status import PAGE_BYTES, Phase, StatusWriter

COUNTER = struct.Struct("<Q")


@pytest.fixture
def page() -> mmap.mmap:
    return mmap.mmap(-1, PAGE_BYTES)


def test_what_is_written_is_read(page: mmap.mmap) -> None:
    writer = StatusWriter(page, tid=42)
    writer.write(Phase.COMPUTE, 7, 2**62, 5, (3, 512, 9000))
    seen = status.read(page)
    assert seen is not None
    assert (seen.phase, seen.step, seen.since_ns, seen.waited_ns, seen.tid) == (Phase.COMPUTE, 7, 2**62, 5, 42)
    assert (seen.decodes, seen.prefill_tokens, seen.context_tokens) == (3, 512, 9000)


def test_an_untouched_page_says_that_the_worker_starts(page: mmap.mmap) -> None:
    seen = status.read(page)
    assert seen is not None
    assert (seen.phase, seen.since_ns) == (Phase.STARTING, 0)


def test_a_reading_in_the_middle_of_a_write_is_none(page: mmap.mmap) -> None:
    StatusWriter(page, 1).write(Phase.IDLE, 1, 1, 1)
    (counter,) = COUNTER.unpack_from(page, 0)
    COUNTER.pack_into(page, 0, counter + 1)
    assert status.read(page) is None


def test_a_reading_that_a_write_overtakes_is_none(page: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer comes by between the reader's two looks at the counter."""
    writer = StatusWriter(page, 1)
    writer.write(Phase.IDLE, 1, 1, 1)
    body = status._BODY

    class SlowReader:
        def unpack_from(self, source: mmap.mmap, offset: int) -> tuple[int, ...]:
            monkeypatch.setattr(status, "_BODY", body)
            seen = body.unpack_from(source, offset)
            writer.write(Phase.COMPUTE, 2, 2, 2)
            return seen

    monkeypatch.setattr(status, "_BODY", SlowReader())
    assert status.read(page) is None
    seen = status.read(page)
    assert seen is not None
    assert seen.step == 2


def test_a_writer_that_dies_in_the_middle_never_becomes_news(page: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = StatusWriter(page, 1)

    class Dies:
        def pack_into(self, *_: object) -> None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(status, "_BODY", Dies())
        writer.write(Phase.IDLE, 1, 1, 1)
    assert status.read(page) is None


@pytest.mark.parametrize("phase", [4, 2**63])
def test_garbage_is_none(page: mmap.mmap, phase: int) -> None:
    StatusWriter(page, 1).write(Phase.IDLE, 1, 1, 1)
    COUNTER.pack_into(page, COUNTER.size, phase)
    assert status.read(page) is None
