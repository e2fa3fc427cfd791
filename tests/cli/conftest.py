"""The command line against real boxes; the helpers are those of tests/live."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "live"))

from live_boxes import Box, running  # noqa: E402 (needs the path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.live)


@pytest.fixture(scope="session")
def cli_box() -> Iterator[Box]:
    """A box that asks for a key."""
    with running("--api-key", "sesame") as box:
        yield box
