"""Looking at and steering a box, through both kinds of call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tui_box import FakeBox
from tui_documents import NOON, event, report, state

from lumenbox.cli import main
from lumenbox.coordinator.control import ControlServer
from lumenbox.errors import LumenboxError
from lumenbox.tui.box import Call, in_process, is_open, look, perform, through_socket
from lumenbox.tui.snapshot import Action, Controls, Snapshot


@pytest.fixture
def box() -> FakeBox:
    return FakeBox()


@pytest.fixture
async def server(box: FakeBox, tmp_path: Path) -> AsyncIterator[Path]:
    control = ControlServer(tmp_path, box.verbs())
    await control.open()
    yield tmp_path
    await control.close()


@pytest.fixture(params=["socket", "in-process"])
async def call(request: pytest.FixtureRequest, box: FakeBox, server: Path) -> Call:
    if request.param == "socket":
        return through_socket(server)
    return in_process(asyncio.get_running_loop(), box.verbs())


async def test_looks_ask_only_for_what_changed(box: FakeBox, call: Call) -> None:
    box.report = report(respawn_s=None)
    first = await asyncio.to_thread(look, call, None, NOON)
    assert (first.state, len(first.events), first.report) == (box.state, 4, box.report)
    box.report = report()
    box.events.append(event(5, "worker_ready", 1))
    box.state["counters"]["generated_tokens"] += 50
    second = await asyncio.to_thread(look, call, first, NOON + 1)
    assert [e["seq"] for e in second.events] == [1, 2, 3, 4, 5]
    assert second.report == report()
    assert second.history.rates == [50.0]
    await asyncio.to_thread(look, call, second, NOON + 2)
    assert len(box.calls) == 2, "a report that is complete is not asked for again"


async def test_another_box_in_the_same_place_is_another_story(box: FakeBox, call: Call) -> None:
    old = Snapshot(state(pid=1), events=(event(900, "drain", 0),), controls=Controls(selected=1))
    seen = await asyncio.to_thread(look, call, old, NOON)
    assert [e["seq"] for e in seen.events] == [1, 2, 3, 4]
    assert seen.controls == old.controls


@pytest.mark.parametrize(
    ("action", "sent", "told"),
    [
        (Action("kill", 2), {"verb": "chaos", "kind": "kill", "worker": 2}, "kill worker 2: exiting"),
        (Action("drain", 1), {"verb": "drain", "worker": 1}, "drain worker 1: drained"),
        (Action("down"), {"verb": "down"}, "down: drained"),
    ],
)
async def test_actions_become_verbs(
    box: FakeBox, call: Call, action: Action, sent: dict[str, object], told: str
) -> None:
    assert await asyncio.to_thread(perform, call, action) == told
    assert box.calls[0].items() <= sent.items()


async def test_refusals_are_errors(call: Call) -> None:
    with pytest.raises(LumenboxError, match="not now"):
        await asyncio.to_thread(perform, call, Action("restart", 0))


def test_reports_are_open_until_streams_and_worker_are_back() -> None:
    assert not is_open(None)
    assert not is_open(report())
    assert is_open(report(respawn_s=None))
    assert is_open(report(recovered_s=None))
    assert not is_open(report(recovered_s=None, requests=[]))


async def test_top_once(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("FORCE_COLOR", "1")
    for arguments in (["--once"], []):
        result = await asyncio.to_thread(CliRunner().invoke, main, ["top", "--run-dir", str(server), *arguments])
        assert result.exit_code == 0, result.output
        assert "\x1b" not in result.stdout
        assert "\r" not in result.stdout
        assert all(len(line) <= 30 for line in result.stdout.splitlines())
        assert "quarantined" in result.stdout


def test_top_without_a_box(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["top", "--run-dir", str(tmp_path)])
    assert result.exit_code == 3
    assert result.stderr.startswith("lumenbox: no lumenbox is running in")
