"""How much memory there is: MemAvailable and the cgroup's limit, whichever is less."""

from __future__ import annotations

import re
from pathlib import Path

from lumenbox.errors import StartupError

RESERVE_BYTES = 256 << 20
"""Left to the processes themselves."""


def available_bytes() -> int:
    """What can be allocated now without anyone being killed."""
    return min(_mem_available(), _cgroup_left())


def require(size: int, what: str, remedy: str) -> None:
    """Raise StartupError unless `size` bytes fit beside a reserve."""
    available = available_bytes()
    if size + RESERVE_BYTES > available:
        raise StartupError(
            f"{what} need {size / 2**20:.0f} MiB and {available / 2**20:.0f} MiB are available: {remedy}"
        )


def oom_kills() -> int:
    """How often the out-of-memory killer has struck in our cgroup (v2 and v1 counters); 0 where not told."""
    folder = _cgroup_folder()
    for name in ("memory.events", "memory.oom_control"):
        match = re.search(r"^oom_kill (\d+)", _text(folder / name), re.MULTILINE)
        if match:
            return int(match[1])
    return 0


def _mem_available() -> int:
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _text(Path("/proc/meminfo")), re.MULTILINE)
    return int(match[1]) << 10 if match else 1 << 62


def _cgroup_left() -> int:
    folder = _cgroup_folder()
    for limit_name, used_name in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        limit, used = _text(folder / limit_name).strip(), _text(folder / used_name).strip()
        if limit.isdigit() and used.isdigit() and int(limit) < 1 << 60:
            return int(limit) - int(used) + _inactive_file(_text(folder / "memory.stat"))
    return 1 << 62


def _inactive_file(stat: str) -> int:
    """Page cache that goes when memory is asked for; version 1 tells it without the children first."""
    found = {name: int(value) for name, value in re.findall(r"^(\w*inactive_file) (\d+)$", stat, re.MULTILINE)}
    return found.get("total_inactive_file", found.get("inactive_file", 0))


def _cgroup_folder() -> Path:
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" and Path(f"/sys/fs/cgroup{path}/memory.events").exists():
            return Path(f"/sys/fs/cgroup{path}")
        if "memory" in controllers.split(","):
            folder = Path(f"/sys/fs/cgroup/memory{path}")  # a container names it so, but sees it as the root
            return folder if folder.exists() else Path("/sys/fs/cgroup/memory")
    return Path("/sys/fs/cgroup")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
