"""The picture as text. `python tests/tui/test_view.py` writes the golden frames anew."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from tui_documents import event, report, snapshot, state, worker

from lumenbox.tui.snapshot import Action, Controls, Snapshot
from lumenbox.tui.view import render
from lumenbox.tui.workers import columns

GOLDEN = Path(__file__).parent / "golden"
FRAMES: dict[str, tuple[Snapshot, int, int | None]] = {
    "paper-80": (snapshot(), 80, None),
    "paper-140": (snapshot(), 140, None),
    "screen-80x30": (snapshot(Controls(selected=2, notice="drain worker 2: drained")), 80, 30),
    "screen-140x30": (snapshot(Controls(owns_box=True, confirming=Action("kill", 1))), 140, 30),
    "screen-30x20": (snapshot(Controls()), 30, 20),
    "screen-20x14": (snapshot(Controls()), 20, 14),
}


def lines(picture: Snapshot, width: int, height: int | None = None) -> list[str]:
    return [line.rstrip() for line in render(picture, width, height).plain.split("\n")]


@pytest.mark.parametrize("name", FRAMES)
def test_golden_frames(name: str) -> None:
    assert lines(*FRAMES[name]) == (GOLDEN / f"{name}.txt").read_text().splitlines()


@pytest.mark.parametrize("height", [None, 3, 8, 14, 24, 60])
@pytest.mark.parametrize("width", [1, 8, 12, 20, 30, 79, 80, 106, 107, 140, 300])
@pytest.mark.parametrize("controls", [None, Controls(selected=9, paused=True, confirming=Action("down"))])
def test_nothing_is_wider_or_higher_than_the_terminal(
    width: int, height: int | None, controls: Controls | None
) -> None:
    picture = render(snapshot(controls), width, height)
    assert all(line.cell_len <= width for line in picture.split("\n"))
    if height is not None and controls is not None:
        assert len(picture.plain.split("\n")) == height


@pytest.mark.parametrize("width", [20, 30])
def test_narrow_terminals_keep_the_state(width: int) -> None:
    shown = "\n".join(lines(snapshot(Controls()), width, 24))
    assert all(word in shown for word in ("ready", "loading", "quarantined"))


def test_the_state_is_the_last_column_to_go() -> None:
    assert [column.title for column in columns(11)] == ["state"]
    assert [column.title for column in columns(3)] == ["state"]
    assert [column.title for column in columns(15)] == ["id", "state"]
    assert len(columns(80)) == len(columns(106)) == len(columns(107)) == 10


def test_workers_around_the_selected_one_show_if_there_are_many() -> None:
    many = state(*(worker(number) for number in range(64)))
    shown = lines(snapshot(Controls(selected=40), state=many), 80, 12)
    assert any(line.startswith("▸40") for line in shown)
    assert shown[-1].startswith("q quit")


def test_a_box_that_does_not_answer_is_told() -> None:
    shown = lines(snapshot(Controls(), trouble="no lumenbox is running in /run/x"), 100, 30)
    assert "not answering" in shown[0]
    assert shown[-2] == "no lumenbox is running in /run/x"


def test_a_second_stop_is_asked_for_by_its_right_name() -> None:
    asked = Controls(owns_box=True, confirming=Action("down"))
    assert lines(snapshot(asked), 80, 30)[-2] == "drain and stop the box? y/n"
    shown = lines(snapshot(asked, state=state(state="draining")), 80, 30)
    assert shown[-2] == "stop at once? open streams end with an error. y/n"


def test_what_comes_from_outside_cannot_steer_the_terminal() -> None:
    hostile = "x\x1b[2J\r\ny"
    seen = snapshot(state=state(model=hostile), events=(event(1, "worker_dead", 0, why=hostile),), report=report())
    text = render(seen, 80).plain
    assert "\x1b" not in text
    assert "\r" not in text
    assert len(text.split("\n")) == len(render(snapshot(events=(event(1, "worker_dead", 0),)), 80).plain.split("\n"))


def test_a_young_box_has_neither_recovery_nor_throughput() -> None:
    text = render(Snapshot(state()), 80).plain
    assert "recovery 3" not in text
    assert "peak" not in text
    assert "761 tok/s" in text


if __name__ == "__main__":
    os.environ["TZ"] = "UTC"
    time.tzset()
    for frame, arguments in FRAMES.items():
        (GOLDEN / f"{frame}.txt").write_text("\n".join(lines(*arguments)) + "\n")
