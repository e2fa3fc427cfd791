"""`lumenbox models ls|pull|show|rm`: parse, ask lumenbox.models, print. Late imports, so that --help is quick."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from lumenbox.models.progress import Progress

JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group()
def models() -> None:
    """List, fetch, inspect and remove models."""


@models.command()
@JSON_OPTION
def ls(as_json: bool) -> None:
    """List the models known by name and those in the cache."""
    from lumenbox.models import catalogue

    rows = [model_row(name) for name in catalogue.names()]
    if as_json:
        print_json({"default": catalogue.catalogue().default, "models": rows})
    elif sys.stdout.isatty():
        print_table(rows)
    else:
        for row in rows:
            click.echo(f"{row['name']}\t{row['state']}\t{row['bytes']}\t{row['about']}")


@models.command()
@click.argument("name")
def pull(name: str) -> None:
    """Fetch NAME (in models.toml, or a hub id) into the cache, or verify every byte of what is there."""
    from lumenbox.models import catalogue

    with progress_on_stderr() as progress:
        path = catalogue.pull(name, progress)
    click.echo(str(path))


@models.command()
@click.argument("name")
@JSON_OPTION
def show(name: str, as_json: bool) -> None:
    """Show where NAME can be had and, if it is here, what it is."""
    record = model_record(name)
    if as_json:
        print_json(record)
        return
    for key, value in record.items():
        click.echo(f"{key:18} {', '.join(value) if isinstance(value, list) else '-' if value is None else value}")


@models.command()
@click.argument("name")
def rm(name: str) -> None:
    """Delete NAME from the cache."""
    from lumenbox.models import catalogue

    click.echo(f"removed {name}: {in_words(catalogue.remove(name))} freed", err=True)


def model_row(name: str) -> dict[str, Any]:
    """One line of `ls`."""
    from lumenbox.models import catalogue

    entry = catalogue.require_entry(name)
    state = catalogue.state(name)
    size = catalogue.cached_bytes(name)
    return {"name": name, "state": str(state), "bytes": size, "about": entry.about, "draft": entry.draft}


def model_record(name: str) -> dict[str, Any]:
    """All that `show` tells; what is not known of an absent or damaged model is null."""
    from lumenbox.errors import ModelError
    from lumenbox.models import catalogue
    from lumenbox.models.facts import check

    entry = catalogue.require_entry(name)
    record: dict[str, Any] = model_row(name) | {
        "sources": [str(source) for source in entry.sources],
        "path": None,
        "problem": None,
        "architecture": None,
        "context_length": None,
        "vocab_size": None,
        "layers": None,
        "dtype": None,
        "weight_bytes": None,
        "has_chat_template": None,
    }
    try:
        path = catalogue.installed(name)
        if path is not None:
            facts = vars(check(path))
            record |= {"path": str(path)} | {key: facts[key] for key in record if key in facts}
    except ModelError as error:
        record["problem"] = str(error)
    return record


def print_json(record: dict[str, Any]) -> None:
    """The record with its schema number."""
    click.echo(json.dumps({"schema": 1} | record))


def print_table(rows: list[dict[str, Any]]) -> None:
    """The rows for a person."""
    from rich.console import Console
    from rich.table import Table

    table = Table("NAME", "STATE", "SIZE", "ABOUT", box=None, header_style="bold")
    for row in rows:
        table.add_row(row["name"], row["state"], in_words(row["bytes"]) if row["bytes"] else "", row["about"])
    Console().print(table)


def in_words(size: float) -> str:
    """A byte count as a person reads it."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


class Lines:
    """Plain lines on stderr: what happens, no counting."""

    def note(self, text: str) -> None:
        """One line."""
        click.echo(text, err=True)

    def advance(self, label: str, done_bytes: int, total_bytes: int) -> None:
        """Not shown: a log has no use for percentages."""


class BarLines:
    """A bar per file, notes above them."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def note(self, text: str) -> None:
        """One line above the bars."""
        self._bars.console.print(text, highlight=False, markup=False)

    def advance(self, label: str, done_bytes: int, total_bytes: int) -> None:
        """Move the file's bar; small files come and go without one."""
        if total_bytes < 1 << 20:
            return
        if label not in self._tasks:
            self._tasks[label] = self._bars.add_task(label)
        self._bars.update(self._tasks[label], completed=done_bytes, total=total_bytes)


@contextmanager
def progress_on_stderr() -> Iterator[Progress]:
    """Bars where a person watches, lines elsewhere."""
    if not sys.stderr.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb":
        yield Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        yield BarLines(bars)
