"""Child processes for tests: fresh interpreters, so that nothing of pytest is forked."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def child(code: str, *arguments: object, **options: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run `code`; it is told apart from a hung one by its first line of output, which is read here."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        **options,  # type: ignore[call-overload]
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def said(process: subprocess.Popen[bytes]) -> str:
    """Its next line; empty once it has closed its output."""
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()
