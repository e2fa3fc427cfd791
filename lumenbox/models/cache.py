"""The cache of pulled models: only whole, verified folders exist in it.

A folder is made beside its place (`.NAME.*.part`), hashed into a manifest, flushed, and renamed into place; a lock file
per model keeps two pulls apart (the kernel drops it with its holder). What is served later is compared with the
manifest: by size and modification time, and by sha256 where the time differs.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lumenbox.errors import ModelError
from lumenbox.models.progress import Progress

MANIFEST = "lumenbox.json"
CHUNK_BYTES = 4 << 20


def cache_dir() -> Path:
    """$LUMENBOX_CACHE, else $XDG_CACHE_HOME/lumenbox, else ~/.cache/lumenbox."""
    if own := os.environ.get("LUMENBOX_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lumenbox"


def models_dir() -> Path:
    """Where the model folders are."""
    return cache_dir() / "models"


def folder_of(name: str) -> Path:
    """A model's place in the cache; a hub id's slash does not make a subfolder."""
    return models_dir() / name.replace("/", "--")


@dataclass(frozen=True)
class Manifest:
    """What a cached folder must hold. `source` says where it came from."""

    source: str
    files: dict[str, dict[str, Any]]


@contextmanager
def locked(name: str, progress: Progress) -> Iterator[None]:
    """The right to change one model's place in the cache; waits for another process that has it."""
    root = models_dir()
    root.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(root / f".{folder_of(name).name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.note(f"another process is pulling {name}; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def staging(name: str) -> Iterator[Path]:
    """An empty folder beside the model's place, gone afterwards whatever happens. Call with the lock held."""
    place = folder_of(name)
    remove_leftovers(name)
    part = Path(tempfile.mkdtemp(prefix=f".{place.name}.", suffix=".part", dir=place.parent))
    try:
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


def remove_leftovers(name: str) -> None:
    """What a pull that was killed left behind. Call with the lock held: nobody else can be writing them."""
    place = folder_of(name)
    for left in place.parent.glob(f".{place.name}.*.part"):
        shutil.rmtree(left, ignore_errors=True)


def publish(made: Path, name: str, source: str, progress: Progress) -> Path:
    """Seal `made` (in a staging folder) with a manifest and move it to the model's place, replacing what is there."""
    write_manifest(made, Manifest(source, {path.name: fingerprint(path, progress) for path in sorted(made.iterdir())}))
    place = folder_of(name)
    if place.exists():
        place.rename(made.with_name("replaced"))
    made.rename(place)
    sync(place.parent)
    return place


def fingerprint(path: Path, progress: Progress) -> dict[str, Any]:
    """Size, modification time and sha256 of a file, which is on the disk afterwards."""
    sha = hash_file(path, progress)
    sync(path)
    info = path.stat()
    return {"bytes": info.st_size, "mtime_ns": info.st_mtime_ns, "sha256": sha}


def hash_file(path: Path, progress: Progress) -> str:
    """sha256 of a file's bytes."""
    sha = hashlib.sha256()
    done, total = 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            sha.update(chunk)
            done += len(chunk)
            progress.advance(f"verify {path.name}", done, total)
    return sha.hexdigest()


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk: a rename must not reach it before the bytes do."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest in one rename."""
    text = json.dumps({"schema": 1, "source": manifest.source, "files": manifest.files}, indent=1)
    new = folder / f"{MANIFEST}.new"
    new.write_text(text, encoding="utf-8")
    sync(new)
    new.rename(folder / MANIFEST)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a cached folder; None when it has none that can be read."""
    try:
        value = json.loads((folder / MANIFEST).read_bytes())
        return Manifest(value["source"], dict(value["files"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def verify(name: str, progress: Progress, *, every_byte: bool = False) -> Manifest:
    """Compare a cached folder with its manifest. Raises ModelError that names the file and the way out."""
    place = folder_of(name)
    manifest = read_manifest(place)
    if manifest is None:
        raise damaged(name, f"{place} has no manifest: it is incomplete or was not pulled by lumenbox")
    moved = False
    for file, expected in manifest.files.items():
        moved |= verify_file(name, place / file, expected, progress, every_byte)
    if moved:  # same bytes, other times (a copied cache): remember the times, so that the next start is quick
        for file, expected in manifest.files.items():
            expected["mtime_ns"] = (place / file).stat().st_mtime_ns
        refresh_manifest(place, manifest)
    return manifest


def refresh_manifest(place: Path, manifest: Manifest) -> None:
    """Write the manifest where that is possible; a read-only cache stays as it is and is hashed again."""
    if os.access(place, os.W_OK):
        write_manifest(place, manifest)


def verify_file(name: str, path: Path, expected: dict[str, Any], progress: Progress, every_byte: bool) -> bool:
    """Whether the file's modification time differs from the manifest's, its bytes being right."""
    try:
        info = path.stat()
    except FileNotFoundError:
        raise damaged(name, f"{path} is missing") from None
    if info.st_size != expected["bytes"]:
        raise damaged(name, f"{path} has {info.st_size} bytes instead of {expected['bytes']}")
    moved: bool = info.st_mtime_ns != expected["mtime_ns"]
    if (moved or every_byte) and hash_file(path, progress) != expected["sha256"]:
        raise damaged(name, f"{path} is not what was pulled (its sha256 differs)")
    return moved


def damaged(name: str, what: str) -> ModelError:
    """The error for a folder that must not be served."""
    return ModelError(f"{what}; run `lumenbox models rm {name}`, then `lumenbox models pull {name}`")
