"""How much memory there is, read from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lumenbox.errors import StartupError
from lumenbox.memory import sizing

MIB = 1 << 20
MEMINFO = "MemTotal:       16000000 kB\nMemFree:          100000 kB\nMemAvailable:    4096000 kB\nBuffers: 1 kB\n"


class Machine:
    """A file tree in place of the real /proc and /sys."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("/proc/meminfo", MEMINFO)

    def write(self, path: str, text: str) -> None:
        file = self.path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def path(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def cgroup_v2(self, folder: str, limit: str, used: int, inactive_file: int = 0, kills: int = 0) -> None:
        self.write("/proc/self/cgroup", f"0::{folder}\n")
        self.write(f"/sys/fs/cgroup{folder}/memory.max", f"{limit}\n")
        self.write(f"/sys/fs/cgroup{folder}/memory.current", f"{used}\n")
        self.write(f"/sys/fs/cgroup{folder}/memory.stat", f"anon 5\ninactive_file {inactive_file}\nfile 9\n")
        self.write(f"/sys/fs/cgroup{folder}/memory.events", f"low 0\noom 3\noom_kill {kills}\noom_group_kill 9\n")

    def cgroup_v1(self, folder: str, at: str, limit: int, used: int, inactive_file: int = 0, kills: int = 0) -> None:
        """Our place is called `folder`; the files are mounted at `at`."""
        self.write("/proc/self/cgroup", f"5:cpu:/x\n4:memory:{folder}\n3:cpuset:/\n0::/\n")
        self.write(f"{at}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{at}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"{at}/memory.stat", f"inactive_file 1\ntotal_inactive_file {inactive_file}\n")
        self.write(f"{at}/memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path)
    monkeypatch.setattr(sizing, "Path", machine.path)
    return machine


def test_without_a_cgroup_it_is_what_the_machine_has(machine: Machine) -> None:
    assert sizing.available_bytes() == 4096000 << 10


def test_a_cgroup_of_version_2_counts_page_cache_as_free(machine: Machine) -> None:
    machine.cgroup_v2("/a/b", limit=str(1000 * MIB), used=700 * MIB, inactive_file=100 * MIB, kills=2)
    assert sizing.available_bytes() == 400 * MIB
    assert sizing.oom_kills() == 2


def test_a_container_sees_its_own_cgroup_as_the_root(machine: Machine) -> None:
    machine.cgroup_v2("/", limit=str(1000 * MIB), used=700 * MIB, kills=1)
    assert sizing.available_bytes() == 300 * MIB
    assert sizing.oom_kills() == 1


def test_max_is_no_limit(machine: Machine) -> None:
    machine.cgroup_v2("/a", limit="max", used=5)
    assert sizing.available_bytes() == 4096000 << 10


@pytest.mark.parametrize("at", ["/sys/fs/cgroup/memory/docker/1", "/sys/fs/cgroup/memory"])
def test_a_cgroup_of_version_1_also_in_a_container_that_mounts_it_as_the_root(machine: Machine, at: str) -> None:
    machine.cgroup_v1("/docker/1", at, limit=1000 * MIB, used=700 * MIB, inactive_file=100 * MIB, kills=4)
    assert sizing.available_bytes() == 400 * MIB
    assert sizing.oom_kills() == 4


def test_version_1_writes_a_huge_number_for_no_limit(machine: Machine) -> None:
    machine.cgroup_v1("/", "/sys/fs/cgroup/memory", limit=2**63 - 4096, used=700 * MIB)
    assert sizing.available_bytes() == 4096000 << 10


def test_where_nothing_is_told_nothing_is_refused(machine: Machine) -> None:
    machine.path("/proc/meminfo").unlink()
    sizing.require(1 << 50, "the KV pools", "lower --workers")
    assert sizing.oom_kills() == 0


def test_what_does_not_fit_beside_the_reserve_is_refused_with_a_remedy(machine: Machine) -> None:
    machine.cgroup_v2("/", limit=str(1000 * MIB), used=0)
    sizing.require(1000 * MIB - sizing.RESERVE_BYTES, "2 KV pools", "lower --workers")
    with pytest.raises(StartupError, match=r"^2 KV pools need 900 MiB and 1000 MiB are available: lower --workers$"):
        sizing.require(900 * MIB, "2 KV pools", "lower --workers")


def test_the_real_files_are_understood() -> None:
    assert 0 < sizing.available_bytes() < 1 << 62
    assert sizing.oom_kills() >= 0
