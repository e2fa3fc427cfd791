"""`lumenbox top`: watch and steer a running box from another terminal."""

from __future__ import annotations

from pathlib import Path

import click

from lumenbox.cli import options


@click.command()
@options.run_dir
@click.option("--once", is_flag=True, help="Print one plain frame; so it does where stdout is no terminal.")
@click.option("--tui", is_flag=True, default=None, help="Draw although NO_COLOR is set, without colours.")
def top(run_dir: Path, once: bool, tui: bool | None) -> None:
    """Watch the box: workers, streams, throughput, events, the last recovery."""
    from lumenbox.tui import app, box, terminal

    call = box.through_socket(run_dir)
    if once or not terminal.may_draw(tui):
        click.echo(app.one_frame(call))
    else:
        app.watch(call)
