"""The journal: any segment replays by itself to the same commands; it is private, bounded, and survives a torn end."""

from __future__ import annotations

import random
import stat
from pathlib import Path

import msgspec
import pytest

from lumenbox import journal
from lumenbox.core import events as e
from lumenbox.core.machine import Core
from lumenbox.core.state import CoreConfig
from lumenbox.journal import Journal, checksum, read_segment, replay
from lumenbox.wire.stream import pack

CONFIG = CoreConfig(workers=3, page_size=16, max_queue=16, max_model_len=4096, recovery="box", respawn=True)


def live(core: Core, log: Journal, count: int, seed: int = 1) -> None:
    """Some history: load, deaths, births, an operator."""
    chance = random.Random(seed)
    for number in range(count):
        log.append(core, event(core, chance, number))
        core.check()


def event(core: Core, chance: random.Random, number: int) -> e.AnyEvent:
    now = number / 7
    worker = chance.choice(list(core.state.workers.values()))
    life = (now, worker.id, worker.incarnation)
    arrival = e.RequestArrived(now, (e.NewRequest(number + 1, chance.randrange(1, 999), 9),), chance.randrange(2))
    match worker.phase.value:
        case "starting" | "loading":
            return e.WorkerReady(*life, 64, False)
        case "suspect":
            lost = tuple(e.Interrupted(req, 50, 49) for req in worker.requests)
            return e.Settled(*life, "signal", chance.random() < 0.2, False, lost)
        case "ready" if core.state.requests and chance.random() < 0.5:
            req = chance.choice(list(core.state.requests.values()))
            return chance.choice(
                (
                    e.Admitted(now, req.worker, req.req, req.epoch, 16),
                    e.RequestFinished(now, req.req, 9),
                    e.ClientGone(now, req.req),
                )
            )
        case "ready" if chance.random() < 0.2:
            return chance.choice((e.WorkerExiting(*life, "eof"), e.OperatorAsked(now, "restart", worker.id)))
        case "ready" if chance.random() < 0.5:
            return e.StepCommitted(*life, number, 3, 16, 99, chance.random() / 10, 50)
    return arrival


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 3000)


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.journal"))


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("seed", range(4))
def test_every_segment_replays_to_the_same_commands(tmp_path: Path, seed: int) -> None:
    core, log = Core(CONFIG), Journal(tmp_path)
    live(core, log, 600, seed)
    log.close()
    assert len(segments(tmp_path)) == journal.SEGMENTS
    for path in segments(tmp_path):
        answers = [(entry.answer, checksum(commands)) for entry, commands in replay(path)]
        assert answers
        assert all(then == now for then, now in answers)


@pytest.mark.usefixtures("small_segments")
def test_each_segment_ends_where_the_next_begins(tmp_path: Path) -> None:
    core, log = Core(CONFIG), Journal(tmp_path)
    live(core, log, 600)
    log.close()
    *paths, last = segments(tmp_path)
    ends = [*(read_segment(path)[0] for path in paths[1:]), read_segment(last)[0], core.state]
    for path, end in zip([*paths, last], ends, strict=True):
        state, entries = read_segment(path)
        again = Core(state=state)
        for entry in entries:
            again.handle(entry.event)
        assert again.state == end


def test_a_snapshot_is_whole(tmp_path: Path) -> None:
    core, log = Core(CONFIG), Journal(tmp_path)
    live(core, log, 200)
    log.close()
    encoded = msgspec.msgpack.encode(core.state)
    assert msgspec.msgpack.decode(encoded, type=type(core.state)) == core.state


def test_a_torn_last_entry_never_happened(tmp_path: Path) -> None:
    core, log = Core(CONFIG), Journal(tmp_path)
    live(core, log, 20)
    log.close()
    (path,) = segments(tmp_path)
    whole = path.read_bytes()
    for cut in range(1, 40):
        path.write_bytes(whole[:-cut])
        _, entries = read_segment(path)
        assert 17 <= len(entries) < 20
        assert all(entry.answer == checksum(commands) for entry, commands in replay(path))


def test_another_answer_shows(tmp_path: Path) -> None:
    """The control: a core that decides otherwise does not replay to the same checksums."""
    core, log = Core(CONFIG), Journal(tmp_path)
    live(core, log, 60)
    log.close()
    (path,) = segments(tmp_path)
    state, entries = read_segment(path)
    other = msgspec.structs.replace(state, config=msgspec.structs.replace(CONFIG, max_queue=0))
    path.write_bytes(pack(msgspec.msgpack.encode(other)) + b"".join(pack(msgspec.msgpack.encode(x)) for x in entries))
    assert any(entry.answer != checksum(commands) for entry, commands in replay(path))


@pytest.mark.usefixtures("small_segments")
def test_it_is_private_and_bounded_and_the_last_run_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    for _ in range(2):
        core, log = Core(CONFIG), Journal(folder)
        assert segments(folder) == []
        live(core, log, 600)
        log.close()
        log.close()
    assert len(segments(folder)) == journal.SEGMENTS
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in segments(folder)} == {0o600}
    snapshot = len(msgspec.msgpack.encode(core.state))
    assert all(path.stat().st_size < 3000 + 2 * snapshot for path in segments(folder))
