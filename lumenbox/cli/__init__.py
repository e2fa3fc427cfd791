"""The command line: parse arguments, print, exit codes. Everything below is imported late, so that --help is quick."""

from __future__ import annotations

import sys

import click

from lumenbox.errors import LumenboxError


class Root(click.Group):
    """Maps errors to one line on stderr and the exit code of CONTRACT §2."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except LumenboxError as error:
            click.echo(f"lumenbox: {error}", err=True)
            sys.exit(error.exit_code)
        except BrokenPipeError:
            sys.exit(1)
        except KeyboardInterrupt:
            sys.exit(130)


@click.group(cls=Root, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lumenbox")
def main() -> None:
    """Serve a language model on every GPU of this box, behind one OpenAI-compatible endpoint."""


def _register() -> None:
    from lumenbox.cli import bench, chat, models, top, up, verbs

    main.add_command(up.up)
    main.add_command(models.models)
    main.add_command(chat.chat)
    main.add_command(bench.bench)
    main.add_command(top.top)
    for verb in verbs.ALL:
        main.add_command(verb)


_register()
