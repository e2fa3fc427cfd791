"""What keys do: (controls, key, state) to (controls, action)."""

from __future__ import annotations

import pytest
from tui_documents import state, worker

from lumenbox.tui.keys import HANGUP, Pressed, decode, press
from lumenbox.tui.snapshot import Action, Controls

BOX = state(worker(0), worker(1, "drained"), worker(2))


def after(*keys: str, controls: Controls | None = None) -> Pressed:
    pressed = Pressed(controls or Controls())
    for key in keys:
        pressed = press(pressed.controls, key, BOX)
    return pressed


def test_decoding() -> None:
    assert decode(b"\x1b[A\x1bOBqK\x1b") == ["up", "down", "q", "K", "escape"]
    assert decode(b"\x1b[1;5C") == ["\x1b[1;5C"]
    assert decode(b"") == [HANGUP]


def test_arrows_go_round() -> None:
    assert [after(*["down"] * count).controls.selected for count in range(4)] == [0, 1, 2, 0]
    assert after("up").controls.selected == 2
    assert after("up", controls=Controls(selected=9)).controls.selected == 1


@pytest.mark.parametrize(
    ("keys", "action"),
    [
        ("H", Action("hang", 0)),
        ("R", Action("restart", 0)),
        ("D", Action("drain", 0)),
        ("q", Action("leave")),
        ("x", None),
        ("k", None),
    ],
)
def test_keys_that_act_at_once(keys: str, action: Action | None) -> None:
    pressed = after(*keys)
    assert pressed.action == action
    assert pressed.controls.confirming is None


def test_d_on_a_drained_worker_resumes_it() -> None:
    assert after("down", "D").action == Action("resume", 1)


def test_killing_is_asked_first() -> None:
    asked = after("down", "down", "K")
    assert (asked.action, asked.controls.confirming) == (None, Action("kill", 2))
    agreed = press(asked.controls, "y", BOX)
    assert (agreed.action, agreed.controls.confirming) == (Action("kill", 2), None)
    assert agreed.controls.notice == "kill worker 2 …"
    for key in ("n", "escape", "K", "q", "down"):
        refused = press(asked.controls, key, BOX)
        assert (refused.action, refused.controls) == (None, Controls(selected=2))


def test_ending_the_box_is_asked_first() -> None:
    owner = Controls(owns_box=True)
    assert after("q", controls=owner).controls.confirming == Action("down")
    assert after("q", "y", controls=owner).action == Action("down")
    assert after("q", "q", controls=owner).action is None


def test_pause_goes_on_and_off() -> None:
    assert after("p").controls.paused
    assert not after("p", "p").controls.paused
