"""One box for all tests that leave it as they found it, and what it answers when nothing happens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_boxes import Answer, Body, Box, descendants, is_alive, running, wait_until
from live_load import alone, varied

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.live)
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def shared_box() -> Iterator[Box]:
    with running() as box:
        yield box


@pytest.fixture(scope="session")
def bodies() -> list[Body]:
    return varied()


@pytest.fixture(scope="session")
def expected(shared_box: Box, bodies: list[Body]) -> list[Answer]:
    """The failure-free run. In exact mode it is every box's, whatever runs beside it."""
    return alone(shared_box.whole().idle(), bodies)


@pytest.fixture
def box(shared_box: Box, expected: list[Answer]) -> Iterator[Box]:
    """A whole and idle box; it must be so again afterwards, with as many processes and descriptors as before."""
    shared_box.whole().idle()
    before = holdings(shared_box)
    yield shared_box
    shared_box.whole().idle()
    wait_until(lambda: is_back(holdings(shared_box), before), f"processes and descriptors back at {before}", 20.0)


def is_back(after: dict[str, int], before: dict[str, int]) -> bool:
    """A connection that was still closing when `before` was counted may be gone by now; nothing may have come."""
    return after["descriptors"] <= before["descriptors"] and {**after, "descriptors": 0} == {**before, "descriptors": 0}


def holdings(box: Box) -> dict[str, int]:
    """What piles up when something is forgotten."""
    return {
        "processes": sum(map(is_alive, descendants(box.pid))),
        "zombies": sum(not is_alive(pid) for pid in descendants(box.pid)),
        "descriptors": len(os.listdir(f"/proc/{box.pid}/fd")),
    }
