"""Verbs that talk to a running box through its control socket."""

from __future__ import annotations

import fcntl
import json
import os
import signal
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
        f"{'holds MB':>10}{'MB/s':>8}"
    )
    for row in document["workers"]:
        pages = f"{row['pages_used']}/{row['pages_total']}"
        pid = row["pid"] or "-"
        click.echo(
            f"{row['id']:>6}  {row['state']:<12}{pid:>8}{row['running']:>9}{row['waiting']:>9}"
            f"{pages:>18}{row['tokens_per_s']:>8}"
            f"{row['arena_bytes'] / 1e6:>10.1f}{row['sealed_bytes_s'] / 1e6:>8.1f}"
        )
    checkpoint = document["checkpoint"]
    click.echo(
        f"KV checkpoints: {checkpoint['coverage']:.0%} of running requests, {checkpoint['lag_tokens']} tokens behind,"
        f" fullest to emptiest holder {checkpoint['holder_balance']}, {checkpoint['evictions']} evicted"
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


@click.command()
@options.run_dir
@options.as_json
@click.option("-f", "--follow", is_flag=True, help="Go on as things happen.")
@click.option("--since", type=int, default=0, help="Only events with a larger number.")
def events(run_dir: Path, as_json: bool, follow: bool, since: int) -> None:
    """Show what happened: deaths, recoveries, moves."""
    from lumenbox.coordinator.control import call

    for event in call(run_dir, "events", None if follow else 30.0, since=since, follow=follow):
        click.echo(json.dumps(event) if as_json else _event_line(event))


def _event_line(event: dict[str, Any]) -> str:
    rest = "  ".join(f"{k}={v}" for k, v in event.items() if k not in ("seq", "t", "kind") and v != "")
    return f"{event['seq']:>6}  {time.strftime('%H:%M:%S', time.localtime(event['t']))}  {event['kind']:<16}{rest}"


@click.command()
@click.argument("which", default="last")
@options.run_dir
@options.as_json
def report(which: str, run_dir: Path, as_json: bool) -> None:
    """Show a recovery: its number, or the last one."""
    from lumenbox.coordinator.control import ask

    document = ask(run_dir, "report", which=which)
    if as_json:
        click.echo(json.dumps(document))
    else:
        _print_report(document)


def _print_report(document: dict[str, Any]) -> None:
    click.echo(f"recovery {document['id']}: worker {document['worker']} ({document['cause']}), {document['strategy']}")
    for name in ("detect_s", "fence_s", "plan_s", "first_token_s", "respawn_s", "recovered_s"):
        if document[name] is not None:
            click.echo(f"  {name.removesuffix('_s'):<12}{1000 * document[name]:9.1f} ms")
    if document["restored_bytes"]:
        megabytes, rate = document["restored_bytes"] / 1e6, (document["restore_bytes_s"] or 0) / 1e6
        click.echo(f"  restored    {megabytes:9.1f} MB at {rate:.0f} MB/s")
    for row in document["requests"]:
        stall = "still waiting" if row["stall_s"] is None else f"stall {1000 * row['stall_s']:.0f} ms"
        click.echo(
            f"  {row['id']:<10}{row['way']:<10} worker {row['from_worker']} to {row['to_worker']}, "
            f"{row['tokens_before']} tokens, {row['recomputed_tokens']} computed again, {stall}"
        )
    click.echo(
        f"  lost {document['lost_tokens']}  duplicated {document['duplicated_tokens']}"
        f"  failed {document['failed_requests']}"
    )


@click.group()
def chaos() -> None:
    """Injure a worker, and verify that it is hurt."""


def _steer(run_dir: Path, wait_s: float, verb: str, **arguments: Any) -> dict[str, Any]:
    from lumenbox.coordinator.control import ask

    return ask(run_dir, verb, wait_s, **arguments)


def _fault(kind: str, text: str, *extra: Any) -> None:
    @options.run_dir
    @options.wait
    @click.argument("worker", type=int)
    def run(worker: int, run_dir: Path, wait_s: float, **arguments: Any) -> None:
        answer = _steer(run_dir, wait_s, "chaos", kind=kind, worker=worker, **arguments)
        click.echo(f"{kind} worker {answer['worker']} (pid {answer['pid']}): {answer['verified']}")

    for decorate in extra:
        run = decorate(run)
    chaos.command(kind, help=text)(run)


SIGNALS = [signum.name for signum in signal.Signals]
_fault(
    "kill",
    "Kill worker N's process.",
    click.option("--signal", type=click.Choice(SIGNALS), default="SIGKILL", show_default=True),
)
_fault("hang", "Freeze worker N's process.")
_fault("slow", "Stretch worker N's steps.", click.option("--factor", type=click.FloatRange(1.0, 1e4), required=True))
_fault("lose", "Take worker N's device away: its KV pool is discarded and its weights are read again.")
_fault("corrupt", "Flip a byte in every sealed page of the requests that worker N serves.")
_fault("clear", "End hang and slow of worker N.")


def _move(verb: str, text: str) -> click.Command:
    @click.command(verb, help=text)
    @click.argument("worker", type=int)
    @options.run_dir
    @options.wait
    def run(worker: int, run_dir: Path, wait_s: float) -> None:
        answer = _steer(run_dir, wait_s, verb, worker=worker)
        click.echo(f"worker {answer['worker']} {answer['state']}")

    return run


drain = _move("drain", "Move worker N's requests away; its process stays, without work.")
resume = _move("resume", "Give a drained worker work again.")
restart = _move("restart", "Replace worker N's process; its streams go on.")


def _pair(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    for value in values:
        if "=" not in value:
            raise click.BadParameter(f"{value!r} is not K=V")
    return {key: text for key, _, text in (value.partition("=") for value in values)}


@click.command()
@options.run_dir
@options.wait
@click.option("--env", "environment", multiple=True, callback=_pair, help="K=V for the new processes; repeatable.")
def upgrade(run_dir: Path, wait_s: float, environment: dict[str, str]) -> None:
    """Replace every worker by one of the code on disk; no stream breaks."""
    answer = _steer(run_dir, wait_s, "upgrade", environment=environment)
    click.echo(f"{answer['workers']} workers upgraded")


ALL = [status, down, logs, events, report, chaos, drain, resume, restart, upgrade]
