"""`lumenbox chat`: talk to the box that runs here."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from lumenbox.cli import options
from lumenbox.errors import LumenboxError


@click.command()
@click.argument("text", required=False)
@options.run_dir
@click.option("--model", help="Model name  [default: the served one]")
@click.option("--max-tokens", type=int)
@click.option("--temperature", type=float, default=0.7, show_default=True)
@click.option("--api-key", envvar="LUMENBOX_API_KEY")
def chat(text: str | None, run_dir: Path, **settings: Any) -> None:
    """Ask TEXT, or hold a conversation if there is none."""
    from lumenbox.coordinator.control import ask

    endpoint = ask(run_dir, "status")["endpoint"]
    messages: list[dict[str, str]] = []
    for line in [text] if text is not None else _lines():
        messages.append({"role": "user", "content": line})
        answer = ""
        for piece in _stream(endpoint, messages, settings):
            answer += piece
            click.echo(piece, nl=False)
            sys.stdout.flush()
        click.echo()
        messages.append({"role": "assistant", "content": answer})


def _lines() -> Iterator[str]:
    while True:
        try:
            yield input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return


def _stream(endpoint: str, messages: list[dict[str, str]], settings: dict[str, Any]) -> Iterator[str]:
    key = settings["api_key"]
    fields = {name: value for name, value in settings.items() if name != "api_key" and value is not None}
    body = {"messages": messages, "stream": True, **fields}
    request = urllib.request.Request(
        endpoint + "/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})},
    )
    try:
        with urllib.request.urlopen(request) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    yield from _pieces(json.loads(line[6:]))
    except urllib.error.HTTPError as error:
        raise LumenboxError(json.loads(error.read())["error"]["message"]) from None


def _pieces(event: dict[str, Any]) -> Iterator[str]:
    if "error" in event:
        raise LumenboxError(event["error"]["message"])
    for choice in event["choices"]:
        if content := choice["delta"].get("content"):
            yield content
