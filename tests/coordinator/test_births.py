"""The pool of a lost device is replaced: whatever goes wrong on the way, every descriptor has one owner."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from lumenbox.coordinator import births
from lumenbox.coordinator.slots import Slot
from lumenbox.errors import StartupError
from lumenbox.memory import segment

POOL_BYTES = 4096


@pytest.fixture
def slot() -> Iterator[Slot]:
    slot = Slot(0, segment.create("pool", POOL_BYTES), POOL_BYTES)
    yield slot
    slot.close()


async def test_a_pool_that_cannot_be_had_leaves_none_and_costs_nobody_a_descriptor(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next birth tries again, when the old pool's number may be a client's."""

    def fail(name: str, size: int) -> int:
        raise StartupError("no memory")

    old = slot.pool_fd
    with monkeypatch.context() as patch:
        patch.setattr(segment, "create", fail)
        with pytest.raises(StartupError):
            await births._replace_pool(slot)
    assert slot.pool_fd == -1
    with socket.socket() as client:
        assert client.fileno() == old, "the number is taken again"
        await births._replace_pool(slot)
        client.getsockname()
        assert slot.pool_fd != old and os.fstat(slot.pool_fd).st_size == POOL_BYTES


async def test_a_birth_cancelled_while_its_pool_is_made_keeps_nothing_of_it(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    begun, go_on = threading.Event(), threading.Event()
    create = segment.create

    def create_later(name: str, size: int) -> int:
        begun.set()
        go_on.wait(10)
        made.append(create(name, size))
        return made[-1]

    monkeypatch.setattr(segment, "create", create_later)
    before = descriptors() - {slot.pool_fd}
    birth = asyncio.ensure_future(births._replace_pool(slot))
    assert await asyncio.to_thread(begun.wait, 10)
    birth.cancel()
    with pytest.raises(asyncio.CancelledError):
        await birth
    go_on.set()
    async with asyncio.timeout(10):
        while not made or descriptors() != before:
            await asyncio.sleep(0.001)
    assert slot.pool_fd == -1


def descriptors() -> set[int]:
    """Open ones of this process, without the one that lists them."""
    return {int(name) for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")}
