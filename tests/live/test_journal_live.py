"""The journal of a box that went through deaths: it replays, it is private, and it knows no prompt."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
from live_boxes import Answer, Body, Box, Clients, Connection, running
from live_load import assert_unchanged, chat

from lumenbox import journal
from lumenbox.bench import boxes, chaos
from lumenbox.cli import bench


def segments(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "journal").glob("*.journal"))


def assert_replays(path: Path) -> int:
    """Every event of a segment gives the commands that it gave live; returns their number."""
    count = 0
    for count, (entry, commands) in enumerate(journal.replay(path), 1):
        assert journal.checksum(commands) == entry.answer, f"{path.name}, event {count}: {entry.event}"
    return count


def test_a_box_after_every_kind_of_trouble_replays(bodies: list[Body], expected: list[Answer]) -> None:
    with running() as box:
        for trouble in (kill_all, hang, move, leave):
            clients = Clients(box, [*bodies, chat("the word is canary-4711", 60)]).flowing()
            trouble(box)
            assert_unchanged(clients.join()[:-1], expected, interrupted=0)
            box.whole().idle()
        assert len(box.events()) > 10
        assert sum(assert_replays(path) for path in segments(box.run_dir)) > 500
        for path in (box.run_dir / "journal", *segments(box.run_dir), box.run_dir / "control.sock"):
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
        for path in box.run_dir.iterdir():
            if path.suffix == ".log":
                assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 or path.name == "lumenbox.log"
        assert stat.S_IMODE(box.run_dir.stat().st_mode) == 0o700
        kept = b"".join(path.read_bytes() for path in segments(box.run_dir))
        assert b"canary" not in kept and b"lighthouse" not in kept


def kill_all(box: Box) -> None:
    for pid in box.pids():
        os.kill(pid, signal.SIGKILL)


def hang(box: Box) -> None:
    os.kill(box.busy()["pid"], signal.SIGSTOP)


def move(box: Box) -> None:
    box.steer("restart", worker=0)
    box.steer("drain", worker=1)
    box.steer("resume", worker=1)


def leave(box: Box) -> None:
    connection = Connection(box.port, "POST", "/v1/chat/completions", chat("leaver", 3000, stream=True))
    connection.head()
    connection.reset()


def test_bench_chaos_loses_nothing_and_its_journal_replays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A short run of the experiment itself, with the run directory kept."""
    kept: list[Path] = []
    monkeypatch.setattr(boxes.shutil, "rmtree", lambda path, **_: kept.append(Path(path)))
    plan = chaos.Plan("tiny-random", 2, 6, 8.0, ("kill", "hang"), 1, 0.5, 7, ("--exact", "on"))
    document = chaos.run(plan, None)
    try:
        assert document["faults"]["done"] == document["faults"]["verified"] >= 2
        assert document["interrupted"] >= 1 and document["streams"] >= 6
        for name in ("failed", "lost_tokens", "duplicated_tokens", "different_tokens"):
            assert document[name] == 0, document
        assert document["leaks"] == {"pages": 0, "processes": 0, "fds": 0}
        assert sum(map(assert_replays, segments(kept[0]))) > 100
    finally:
        monkeypatch.undo()
        boxes.shutil.rmtree(kept[0], ignore_errors=True)


def test_bench_chaos_without_a_hit_or_with_other_tokens_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: no fault reaches the box, and one reference is not what the box says."""
    honest = chaos._references

    async def bent(*arguments: Any) -> Any:
        answers = await honest(*arguments)
        for answer in answers:
            answer.token_ids[0][7] += 1
        return answers

    monkeypatch.setattr(chaos, "_references", bent)
    document = chaos.run(chaos.Plan("tiny-random", 1, 4, 3.0, ("kill",), 1, 3600.0, 7), None)
    assert document["interrupted"] == 0 and document["different_tokens"] >= 4
    assert "different_tokens" in bench._doubt(document, "on")
    assert "nothing is proved" in bench._doubt({**document, "different_tokens": 0}, "on")
