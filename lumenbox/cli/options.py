"""Options that many verbs share, and the types of their values."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


class Size(click.ParamType[int]):
    """Bytes: 1073741824, 512M, 1.5GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", str(value), re.IGNORECASE)
        if match is None:
            self.fail(f"{value!r} is not a size; write 1073741824, 512M or 1GiB", param, ctx)
        return int(float(match[1]) * 2 ** UNITS[match[2].lower()])


def run_dir_default() -> Path:
    """$LUMENBOX_RUN_DIR, else $XDG_RUNTIME_DIR/lumenbox, else a private directory under the user's temp dir."""
    if path := os.environ.get("LUMENBOX_RUN_DIR"):
        return Path(path)
    if base := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(base) / "lumenbox"
    return Path(tempfile.gettempdir()) / f"lumenbox-{os.getuid()}"


def flag(*names: str, **settings: Any) -> Callable[[Any], Any]:
    """An option of `up`: its environment variable is LUMENBOX_<FLAG>."""
    long = next(name for name in names if name.startswith("--")).partition("/")[0]
    variable = "LUMENBOX_" + long.removeprefix("--").replace("-", "_").upper()
    return click.option(*names, envvar=variable, show_default="default" in settings, **settings)


run_dir = click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    default=run_dir_default,
    envvar="LUMENBOX_RUN_DIR",
    help="Where the box keeps its control socket and logs.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
wait = click.option("--wait", "wait_s", type=float, default=120.0, show_default=True, help="Seconds before giving up.")
