"""A box of one's own for an experiment: started as a user would start it, ended by pid."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lumenbox.coordinator.control import ask, call
from lumenbox.errors import StartupError


@dataclass(slots=True, frozen=True)
class Box:
    """A running box."""

    endpoint: str
    run_dir: Path
    pid: int

    def state(self) -> dict[str, Any]:
        """The document of `status --json`."""
        return ask(self.run_dir, "status")

    def ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Call a verb; returns its answer."""
        return ask(self.run_dir, verb, 120.0, **arguments)

    def events(self, since: int = 0) -> list[dict[str, Any]]:
        """What happened so far."""
        return list(call(self.run_dir, "events", since=since))

    def reports(self) -> list[dict[str, Any]]:
        """Every recovery report that the box still has."""
        numbers = [event["report"] for event in self.events() if event["kind"] == "recovery"]
        return [self.ask("report", which=number) for number in numbers]


@contextmanager
def running(model: str, *flags: str, environment: dict[str, str] | None = None) -> Iterator[Box]:
    """A ready box that serves `model`; stopped at the end, its run directory removed."""
    run_dir = Path(tempfile.mkdtemp(prefix="lumenbox-bench-"))
    command = [sys.executable, "-m", "lumenbox", "up", model, "--port", "0", "--run-dir", str(run_dir), "--no-tui"]
    errors_path = run_dir / "up.err"
    with open(errors_path, "wb") as errors:
        process = subprocess.Popen(
            [*command, *flags], stdout=subprocess.PIPE, stderr=errors, env={**os.environ, **(environment or {})}
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline().decode().split()
        if line[:2] != ["lumenbox", "ready"]:
            raise StartupError(f"the box did not start: {errors_path.read_text().strip()[-500:]}")
        yield Box(line[2], run_dir, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            if process.stdout is not None:
                process.stdout.close()
        shutil.rmtree(run_dir, ignore_errors=True)
