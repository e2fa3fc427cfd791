"""Segments: no name, zeroed, private to who holds the descriptor, refused in one sentence when they do not fit."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator

import pytest

from lumenbox.errors import StartupError
from lumenbox.memory import segment


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture
def fd() -> Iterator[int]:
    fd = segment.create("lumenbox-test", 1 << 16)
    yield fd
    os.close(fd)


def test_it_has_no_name_in_any_folder_and_is_closed_on_exec(fd: int) -> None:
    assert os.fstat(fd).st_nlink == 0
    assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:lumenbox-test")
    assert not os.get_inheritable(fd)


def test_it_is_zeroed_and_allocated(fd: int) -> None:
    info = os.fstat(fd)
    assert (info.st_size, info.st_blocks * 512) == (1 << 16, 1 << 16)
    assert os.pread(fd, 1 << 16, 0) == bytes(1 << 16)


def test_two_mappings_see_the_same_bytes_and_outlive_the_descriptor() -> None:
    fd = segment.create("lumenbox-test", 4096)
    with segment.attach(fd) as ours, segment.attach(fd) as theirs:
        os.close(fd)
        ours[7:10] = b"abc"
        assert theirs[7:10] == b"abc"


@pytest.fixture
def little_memory() -> Iterator[None]:
    """No file may grow beyond 1 MiB: the kernel refuses at once, as it does when memory is short."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("little_memory")
def test_what_does_not_fit_is_refused_in_one_sentence_and_leaves_nothing() -> None:
    before = descriptors()
    with pytest.raises(StartupError, match=r"^cannot allocate 2 MiB for lumenbox-test: \S.*$"):
        segment.create("lumenbox-test", 2 << 20)
    assert descriptors() == before


def test_memory_that_is_short_at_the_last_page_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    before = descriptors()
    with pytest.raises(StartupError, match="No space left"):
        segment.create("lumenbox-test", 4096)
    assert descriptors() == before
