"""`lumenbox up`: flags, environment and file become one configuration; then the box runs, here or detached."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import click

from lumenbox.cli import options
from lumenbox.cli.options import flag
from lumenbox.errors import StartupError, TimedOut


def _load_file(ctx: click.Context) -> None:
    """lumenbox.toml, ./ then the user's config directory: defaults below the environment."""
    config_home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    for path in (Path("lumenbox.toml"), config_home / "lumenbox" / "lumenbox.toml"):
        if path.is_file():
            ctx.default_map = _read_file(path, _keys(ctx.command.params))
            return


def _keys(params: list[click.Parameter]) -> dict[str, click.Parameter]:
    """The parameter behind each key: a flag's own name. `detach` is for a command line only: it would detach again."""
    keys = {option.removeprefix("--").replace("-", "_"): param for param in params for option in param.opts}
    return {key: param for key, param in keys.items() if param.name != "detach"}


def _read_file(path: Path, known: dict[str, click.Parameter]) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{path}: {error}") from None
    renamed = {key.replace("-", "_"): value for key, value in values.items()}
    if unknown := sorted(set(renamed) - set(known)):
        raise click.UsageError(f"{path}: unknown key {unknown[0]!r}")
    return {str(known[key].name): _listed(known[key], value) for key, value in renamed.items()}


def _listed(param: click.Parameter, value: Any) -> Any:
    """One value of a flag that may be repeated is a list of one."""
    return [value] if param.multiple and isinstance(value, str) else value


class UpCommand(click.Command):
    """Reads lumenbox.toml before the command line is parsed."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        probe = click.Context(self, info_name=info_name, parent=parent)
        _load_file(probe)
        return super().make_context(info_name, args, parent, default_map=probe.default_map, **extra)


@click.command(cls=UpCommand)
@click.argument("model", required=False, envvar="LUMENBOX_MODEL")
@flag("--workers", type=click.IntRange(1, 64), help="Worker processes  [default: CUDA devices, else 2]")
@flag("--devices", default="auto", help="cpu or auto")
@flag("--host", default="127.0.0.1")
@flag("--port", type=click.IntRange(0, 65535), default=8000, help="0 takes any free one")
@flag("--api-key", "api_keys", multiple=True, help="Ask clients for this key; may be repeated")
@options.run_dir
@click.option("-d", "--detach", is_flag=True, help="Return when the box is ready, and leave it running.")
@flag("--wait", "wait_s", type=float, default=600.0, help="Seconds until it must be ready")
@flag("--max-model-len", type=click.IntRange(min=1))
@flag("--max-num-seqs", type=click.IntRange(min=1), default=64)
@flag("--max-num-batched-tokens", type=click.IntRange(min=1), default=512)
@flag("--page-size", type=click.IntRange(1, 256), default=16, help="Tokens in a KV page")
@flag("--kv-cache-memory", type=options.Size(), default="1GiB", help="Per worker")
@flag("--kv-pages", type=click.IntRange(min=2), help="Per worker, instead of a size")
@flag("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto")
@flag("--seed", type=int, default=0, help="Of the seeds that requests do not give")
@flag("--served-model-name", help="Name in the API  [default: MODEL]")
@flag("--drain-timeout", type=float, default=30.0, help="Seconds that running requests get at the end")
@flag("--max-queue", type=click.IntRange(min=1), default=1024, help="Requests that may wait")
@flag("--exact", type=click.Choice(["auto", "on", "off"]), default="auto", help="Bits independent of the batch")
@flag("--no-respawn", is_flag=True, help="Dead workers stay dead")
@flag("--recovery", type=click.Choice(["none", "restart", "fixed", "lumen", "box"]), default="box")
@flag("--checkpoint-budget", type=options.Size(), help="Arena per holder; 0 is none  [default: by live context]")
@flag("--replicas", type=click.IntRange(1, 2), default=1, help="KV checkpoints of each page")
@flag("--placement", type=click.Choice(["none", "fixed", "load-aware"]), help="Overrides the strategy's")
@flag("--routing", type=click.Choice(["holder", "locality-aware", "least-loaded"]), help="Overrides the strategy's")
@flag("--eviction", type=click.Choice(["shortest_prefix", "lru", "priority"]), default="shortest_prefix")
@flag("--failure-domains", help="Workers that fail together: 0-3,4-7  [default: each by itself]")
@flag("--load-estimate", type=click.Choice(["pages", "seconds"]), help="What a holder's load is")
@flag("--alpha", type=float, help="Weight of pages held (pages)")
@flag("--beta", type=float, help="Weight of the queue depth (pages)")
@flag("--lambda", "lam", type=float, help="Weight of the restore time (seconds)")
@flag("--routing-rule", type=click.Choice(["threshold", "mean"]), help="Of locality-aware routing")
@flag("--theta", type=float, help="Holder load up to which it is taken (threshold)")
@flag("--tau", type=int, help="Saved tokens beyond which the holder is taken (threshold)")
@flag("--reload-bandwidth", type=options.Size(), default="0", help="Bytes a second when weights are read again")
@flag("--generation-config", type=click.Choice(["request", "model"]), default="request")
@flag("--chaos-env", is_flag=True, help="Allow LUMENBOX_FAULT although an API key is set")
@flag("--tui/--no-tui", default=None, help="Show the box on the terminal  [default: if stdout is one]")
@click.pass_context
def up(ctx: click.Context, /, detach: bool, wait_s: float, **values: Any) -> None:
    """Start a box that serves MODEL (a name, a folder, or a hub id; default: smollm2-135m)."""
    if detach:
        _detached(values["run_dir"], wait_s)
        return
    from lumenbox.cli.serve import Show, serve
    from lumenbox.cli.settings import resolve
    from lumenbox.tui.terminal import may_draw

    show: Show | None = None
    if may_draw(values.pop("tui")):
        from lumenbox.tui.app import beside as show
    ctx.exit(serve(resolve(values), wait_s, show))


def _detached(run_dir: Path, wait_s: float) -> None:
    """Run the same command in a session of its own; return when it prints its ready line."""
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    arguments = [a for a in sys.argv[1:] if a not in ("-d", "--detach")]
    errors_path = run_dir / "up.err"
    with open(errors_path, "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "lumenbox", *arguments, "--no-tui"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    assert process.stdout is not None
    deadline = time.monotonic() + wait_s + 10
    line = process.stdout.readline().decode()
    if line.startswith("lumenbox ready"):
        click.echo(line, nl=False)
        return
    code = process.wait(max(1.0, deadline - time.monotonic()))
    last = errors_path.read_text().strip().splitlines()[-1:] or [f"lumenbox up ended with exit code {code}"]
    message = last[0].removeprefix("lumenbox: ")
    raise TimedOut(message) if code == TimedOut.exit_code else StartupError(message)
