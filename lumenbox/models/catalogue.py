"""models.toml: the models that lumenbox knows by name, and the way from a name to a folder that can be served."""

from __future__ import annotations

import re
import shutil
import tomllib
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from lumenbox.errors import ModelError
from lumenbox.models.cache import (
    folder_of,
    locked,
    models_dir,
    publish,
    read_manifest,
    remove_leftovers,
    staging,
    verify,
)
from lumenbox.models.facts import check
from lumenbox.models.progress import Progress, Silent
from lumenbox.models.sources import (
    HubSource,
    PathSource,
    SeedSource,
    Source,
    SourceUnavailable,
    WheelSource,
    fetch,
)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Entry:
    """One model: where it can be had, in order, and the name of the model that drafts for it."""

    name: str
    about: str
    sources: tuple[Source, ...]
    draft: str | None = None


@dataclass(frozen=True)
class Catalogue:
    """All of models.toml."""

    default: str
    entries: dict[str, Entry]


class State(StrEnum):
    """What the cache holds of a model."""

    ABSENT = "absent"
    READY = "ready"
    DAMAGED = "damaged"


def catalogue_path() -> Path:
    """models.toml beside this module (in a wheel), else at the top of the checkout."""
    packaged = Path(__file__).with_name("models.toml")
    return packaged if packaged.is_file() else Path(__file__).parents[2] / "models.toml"


@cache
def catalogue() -> Catalogue:
    """models.toml, read once."""
    path = catalogue_path()
    try:
        value = tomllib.loads(path.read_text(encoding="utf-8"))
        entries = {name: parse_entry(name, fields) for name, fields in value["models"].items()}
        return Catalogue(value["default"], entries)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} cannot be used: {error!r}") from None


def parse_entry(name: str, fields: dict[str, Any]) -> Entry:
    """One table of models.toml."""
    return Entry(
        name, fields["about"], tuple(parse_source(source) for source in fields["sources"]), fields.get("draft")
    )


def parse_source(fields: dict[str, Any]) -> Source:
    """One line of `sources`."""
    match fields:
        case {"hub": str(repo)}:
            return HubSource(repo, fields.get("revision"))
        case {"wheel": str(requirement), "member": str(member), "sha256": str(sha256)}:
            return WheelSource(requirement, member, sha256)
        case {"path": str(path)}:
            return PathSource(Path(path).expanduser())
        case {"seed": int(seed), "sha256": str(sha256)}:
            return SeedSource(seed, sha256)
    raise ValueError(f"unknown kind of source {fields}")


def find_entry(name: str) -> Entry | None:
    """The entry called `name`, or one made up for a hub id; None when `name` is neither."""
    entry = catalogue().entries.get(name)
    if entry is None and HUB_ID.fullmatch(name):
        return Entry(name, "from the hub", (HubSource(name),))
    return entry


def require_entry(name: str) -> Entry:
    """The entry, or an error that lists what there is."""
    entry = find_entry(name)
    if entry is None:
        known = ", ".join(catalogue().entries)
        raise ModelError(f"model {name} does not exist: no such folder, no hub id (owner/name), not one of {known}")
    return entry


def resolve(name: str, progress: Progress | None = None) -> Path:
    """A folder for `name`, pulled first if need be: a name in models.toml, a local folder, or a hub id.

    A cached folder that is not what was pulled is refused, never repaired silently. Raises ModelError.
    """
    progress = progress or Silent()
    if is_local(name):
        return local_folder(name)
    entry = require_entry(name)
    return usable(entry, progress) or pull(name, progress)


def is_local(name: str) -> bool:
    """Whether `name` means a folder: it is one, or is written like a path. Names in models.toml come first."""
    if not name or name in catalogue().entries:
        return False
    return name.startswith(("/", "./", "../", "~")) or Path(name).is_dir()


def local_folder(name: str) -> Path:
    """A folder that the user named."""
    path = Path(name).expanduser()
    if not path.is_dir():
        raise ModelError(f"model folder {path} does not exist")
    return path


def usable(entry: Entry, progress: Progress, *, every_byte: bool = False) -> Path | None:
    """The verified folder that can be served now; None when it must be pulled (also when models.toml has moved on)."""
    for source in entry.sources:
        if isinstance(source, PathSource) and source.path.is_dir():
            return source.path
    place = folder_of(entry.name)
    if not place.exists():
        return None
    manifest = verify(entry.name, progress, every_byte=every_byte)
    return place if manifest.source in map(str, entry.sources) else None


def pull(name: str, progress: Progress | None = None) -> Path:
    """Have `name` in the cache, whole: every byte of what is there is verified, else the first source that can fetches.

    Raises ModelError with one line that names each source's reason.
    """
    progress = progress or Silent()
    entry = require_entry(name)
    try:
        with locked(name, progress):
            return sound(entry, progress) or pull_from_any(entry, progress)
    except OSError as error:
        raise ModelError(f"the cache {models_dir()} cannot be used: {error}") from None


def sound(entry: Entry, progress: Progress) -> Path | None:
    """What is there, if every byte of it is right."""
    try:
        return usable(entry, progress, every_byte=True)
    except ModelError as error:
        progress.note(f"pulling again: {error}")
        return None


def pull_from_any(entry: Entry, progress: Progress) -> Path:
    """The first source that delivers."""
    reasons = []
    for source in entry.sources:
        progress.note(f"{entry.name}: trying {source}")
        try:
            return pull_from(source, entry.name, progress)
        except SourceUnavailable as reason:
            reasons.append(f"{source}: {reason}")
            progress.note(reasons[-1])
    raise ModelError(f"{entry.name} could not be pulled: " + "; ".join(reasons))


def pull_from(source: Source, name: str, progress: Progress) -> Path:
    """One source's folder, checked and in its place."""
    if isinstance(source, PathSource):
        raise SourceUnavailable("no such folder")
    with staging(name) as part:
        made = part / "model"
        made.mkdir()
        fetch(source, made, progress)
        check(made)
        return publish(made, name, str(source), progress)


def state(name: str) -> State:
    """What the cache holds of `name`, judged without reading the weights where their times are unchanged."""
    entry = require_entry(name)
    try:
        return State.READY if usable(entry, Silent()) else State.ABSENT
    except ModelError:
        return State.DAMAGED


def installed(name: str) -> Path | None:
    """The folder of `name` if it is here; None if not. Raises ModelError when what is here is damaged."""
    return usable(require_entry(name), Silent())


def names() -> list[str]:
    """The catalogue's names, then the hub ids in the cache."""
    known = list(catalogue().entries)
    places = sorted(models_dir().glob("[!.]*")) if models_dir().is_dir() else []
    cached = [place.name.replace("--", "/", 1) for place in places]
    return known + [name for name in cached if name not in known and find_entry(name)]


def remove(name: str) -> int:
    """Delete `name` from the cache; returns the bytes set free. Raises ModelError when nothing is there."""
    place = folder_of(require_entry(name).name)
    with locked(name, Silent()):
        remove_leftovers(name)
        if not place.exists():
            raise ModelError(f"{name} is not in the cache {models_dir()}")
        freed = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        doomed = place.with_name(f".{place.name}.removed.part")
        place.rename(doomed)
        shutil.rmtree(doomed)
    return freed


def cached_bytes(name: str) -> int:
    """What the cache holds of `name` by its manifest; 0 when it has none."""
    manifest = read_manifest(folder_of(name))
    return sum(file["bytes"] for file in manifest.files.values()) if manifest else 0
