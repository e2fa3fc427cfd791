"""Verbs that talk to a running box through its control socket."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from lumenbox.cli import options
from lumenbox.errors import LumenboxError, NotRunning, TimedOut

DEGRADED = 4


@click.command()
@options.run_dir
@options.as_json
@click.option("--check", is_flag=True, help="Exit 4 unless every worker serves.")
@click.pass_context
def status(ctx: click.Context, run_dir: Path, as_json: bool, check: bool) -> None:
    """Show the state of the box."""
    from lumenbox.coordinator.control import ask

    document = ask(run_dir, "status")
    if as_json:
        click.echo(json.dumps(document))
    else:
        _print_status(document)
    if check and document["state"] != "ready":
        ctx.exit(DEGRADED)


def _print_status(document: dict[str, Any]) -> None:
    requests = document["requests"]
    click.echo(f"{document['endpoint']}  {document['model']}  {document['state']}  up {document['uptime_s']:.0f} s")
    click.echo("  ".join(f"{name} {requests[name]}" for name in ("running", "waiting", "finished", "failed")))
    click.echo(
        f"{'worker':>6}  {'state':<12}{'pid':>8}{'running':>9}{'waiting':>9}{'pages used/total':>18}{'tok/s':>8}"
    )
    for row in document["workers"]:
        pages = f"{row['pages_used']}/{row['pages_total']}"
        pid = row["pid"] or "-"
        click.echo(
            f"{row['id']:>6}  {row['state']:<12}{pid:>8}{row['running']:>9}{row['waiting']:>9}"
            f"{pages:>18}{row['tokens_per_s']:>8}"
        )


@click.command()
@options.run_dir
@options.wait
@click.option("--now", is_flag=True, help="Do not wait for running requests.")
def down(run_dir: Path, wait_s: float, now: bool) -> None:
    """Drain the box and stop it."""
    from lumenbox.coordinator.control import ask

    ask(run_dir, "down", now=now)
    lock = os.open(run_dir / "lock", os.O_RDWR)
    try:
        _wait_for_lock(lock, time.monotonic() + wait_s)
    finally:
        os.close(lock)


def _wait_for_lock(fd: int, deadline: float) -> None:
    """The lock of the run directory is free once the coordinator is gone; flock knows no timeout."""
    while time.monotonic() < deadline:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.02)
    raise TimedOut("the box is still draining; `lumenbox down --now` does not wait")


@click.command()
@options.run_dir
@click.option("-f", "--follow", is_flag=True, help="Go on as lines are written.")
@click.option("--worker", type=int, help="The log of one worker's processes.")
def logs(run_dir: Path, follow: bool, worker: int | None) -> None:
    """Show the log of the box, or of a worker."""
    path = run_dir / ("lumenbox.log" if worker is None else f"worker-{worker}.log")
    if not path.exists():
        raise NotRunning(f"there is no {path.name} in {run_dir}")
    sys.stdout.flush()
    command = ["tail", "-n", "+1", *(["-F"] if follow else []), str(path)]
    if subprocess.run(command, check=False).returncode not in (0, -2):
        raise LumenboxError(f"cannot show {path}")


ALL = [status, down, logs]
