"""Any history of requests, moves, deaths and damage ends every request once, with its own tokens and its own pages."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing

import histories
import pytest
from histories import World

from lumenbox.wire import frames
from lumenbox.worker.copier import Copy

SEEDS = 100


def held() -> tuple[int, int]:
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    before = held()
    yield
    threads, descriptors = held()  # those of other tests may have gone meanwhile
    assert threads <= before[0] and descriptors <= before[1]


def play(seed: int, patch: pytest.MonkeyPatch) -> None:
    with closing(World(seed, patch)) as world:
        try:
            world.run()
        except Exception as error:
            again = f"python -m pytest 'tests/worker/test_histories.py::test_any_history[{seed}]'"
            error.add_note("\n".join((*world.history, f"again, though the copier has a timing of its own: {again}")))
            raise


@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_history(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    play(seed, monkeypatch)


# -- the rig sees what it claims to see ------------------------------------------------------------------------------


def play_all(patch: pytest.MonkeyPatch) -> None:
    for seed in range(SEEDS):
        play(seed, patch)


class Confused(histories.SlowArena):
    """Returns another page as if it were the one that was asked for."""

    def read(self, slot: int, page: memoryview) -> int:
        crc = super().read(slot, page)
        super().read(slot ^ 1, page)
        return crc


class Hasty(histories.MortalCopier):
    """Does not wait for the copy that is being written."""

    def forget(self, rid: int) -> list[Copy]:
        with self._change:
            writing, self._writing = self._writing, None
            dropped = super().forget(rid)
            self._writing = writing
            return dropped


class Buffered(histories.FakeLink):
    """Says that a frame is sent, so that its pages are used again, while only the one before it is."""

    _kept = b""

    def write(self, data: bytes) -> None:
        data, self._kept = self._kept, data
        super().write(data)

    def receive(self, *, block: bool) -> list[frames.ToWorker]:
        if block:
            self.write(b"")
        return super().receive(block=block)


def test_another_page_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "SlowArena", Confused)
    with pytest.raises(AssertionError, match="foreign"):
        play_all(monkeypatch)


def test_a_copy_that_outlasts_its_request_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "MortalCopier", Hasty)
    with pytest.raises(AssertionError):  # what it spoils first, a slot or a page, is a matter of timing
        play_all(monkeypatch)


def test_a_page_that_is_used_again_before_its_frame_is_sent_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "FakeLink", Buffered)
    monkeypatch.setattr(World, "_check_answered", lambda *_: None)  # a frame that comes late is the smaller evil
    with pytest.raises(AssertionError, match="foreign"):
        play_all(monkeypatch)
