"""On a real (pseudo-)terminal: what is written to it, and that it is left as it was found."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tui_box import FakeBox
from tui_terminal import ALTERNATE, COLOUR, HIDDEN, MAIN, Terminal

from lumenbox.coordinator.control import ControlServer

SCRIPT = Path(__file__).parent / "show_beside.py"
LUMENBOX = (sys.executable, "-m", "lumenbox")


@pytest.fixture
async def terminal() -> AsyncIterator[Terminal]:
    opened = Terminal()
    yield opened
    opened.close()


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[FakeBox]:
    fake = FakeBox()
    control = ControlServer(tmp_path, fake.verbs())
    await control.open()
    yield fake
    await control.close()


@pytest.mark.parametrize(("end", "code"), [(b"q", 0), (b"\x03", 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
async def test_top_leaves_the_terminal_as_it_was(
    terminal: Terminal, box: FakeBox, tmp_path: Path, end: bytes | signal.Signals, code: int
) -> None:
    process = await terminal.run(*LUMENBOX, "top", "--run-dir", tmp_path)
    await terminal.shows(b"quarantined")
    assert ALTERNATE in terminal.output
    assert HIDDEN in terminal.output
    assert not terminal.is_restored()
    terminal.press(end) if isinstance(end, bytes) else process.send_signal(end)
    assert await process.wait() == code
    await terminal.shows(MAIN)
    assert terminal.is_restored()
    assert b"Traceback" not in terminal.output


async def test_keys_reach_the_box(terminal: Terminal, box: FakeBox, tmp_path: Path) -> None:
    process = await terminal.run(*LUMENBOX, "top", "--run-dir", tmp_path)
    await terminal.shows(b"quarantined")
    terminal.press(b"\x1b[BK")
    await terminal.shows(b"kill worker 1? y/n")
    terminal.press(b"y")
    await terminal.shows(b"kill worker 1: exiting")
    assert [call["kind"] for call in box.calls if call["verb"] == "chaos"] == ["kill"]
    terminal.press(b"R")
    await terminal.shows(b"restart worker 1: not now")
    terminal.press(b"q")
    assert await process.wait() == 0


async def test_no_color_drops_colours_only_if_the_picture_is_asked_for(
    terminal: Terminal, box: FakeBox, tmp_path: Path
) -> None:
    process = await terminal.run(*LUMENBOX, "top", "--tui", "--run-dir", tmp_path, NO_COLOR="1")
    await terminal.shows(b"quarantined")
    terminal.press(b"q")
    assert await process.wait() == 0
    assert ALTERNATE in terminal.output
    assert not COLOUR.search(terminal.output)


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"TERM": "dumb", "FORCE_COLOR": "1"}])
async def test_one_plain_frame_where_cursor_control_is_unwanted(
    terminal: Terminal, box: FakeBox, tmp_path: Path, environment: dict[str, str]
) -> None:
    process = await terminal.run(*LUMENBOX, "top", "--run-dir", tmp_path, **environment)
    assert await process.wait() == 0
    await terminal.shows(b"recovery")
    assert b"\x1b" not in terminal.output


async def test_beside_a_box_log_lines_wait_for_the_end(terminal: Terminal) -> None:
    process = await terminal.run(sys.executable, SCRIPT)
    await terminal.shows(b"quarantined")
    await asyncio.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0
    await terminal.shows(b"the end")
    assert terminal.is_restored()
    assert re.search(rb"^ready.*1049h.*1049l.*a line for the log.*the end", terminal.output, re.DOTALL)


async def test_a_picture_that_breaks_leaves_box_and_terminal_whole(terminal: Terminal) -> None:
    process = await terminal.run(sys.executable, SCRIPT, "break")
    await terminal.shows(MAIN)
    await terminal.shows(b"KeyError")
    assert process.returncode is None
    assert terminal.is_restored()
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0


async def test_a_terminal_that_has_stopped_holds_nobody_up(terminal: Terminal) -> None:
    process = await terminal.run(sys.executable, SCRIPT, "stuck")
    await terminal.shows(b"quarantined")
    asyncio.get_running_loop().remove_reader(terminal.master)
    await asyncio.sleep(3.0)  # frames fill the kernel's buffer
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(10):
        assert await process.wait() == 0
