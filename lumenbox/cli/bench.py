"""`lumenbox bench …`: measure; one JSON object on stdout with --json, a table otherwise."""

from __future__ import annotations

import click


@click.group()
def bench() -> None:
    """Measure the engine, the API and recovery."""
