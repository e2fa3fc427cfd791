"""`lumenbox bench …`: measure; one JSON object on stdout."""

from __future__ import annotations

import json
from typing import Any

import click

from lumenbox.cli import options
from lumenbox.errors import LumenboxError

FAULTS = ("kill", "hang", "slow", "lose", "corrupt")


@click.group()
def bench() -> None:
    """Measure the engine, the API and recovery."""


def _numbers(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of numbers") from None


def _faults(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    kinds = tuple(value.split(","))
    if unknown := set(kinds) - set(FAULTS):
        raise click.BadParameter(f"unknown fault {sorted(unknown)[0]!r}; known: {', '.join(FAULTS)}")
    return kinds


def _show(document: dict[str, Any], as_json: bool) -> None:
    click.echo(json.dumps(document) if as_json else json.dumps(document, indent=1))


@bench.command()
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--batch", default="1,8,16,32", callback=_numbers, show_default=True)
@click.option("--context", default="256", callback=_numbers, show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--exact", type=click.Choice(["on", "off"]), default="off", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--peer", type=click.Choice(["transformers", "vllm"]))
@options.as_json
def engine(
    model: str,
    batch: tuple[int, ...],
    context: tuple[int, ...],
    dtype: str,
    exact: str,
    threads: int,
    peer: str | None,
    as_json: bool,
) -> None:
    """Tokens a second of the paged loop, beside a peer in the same run."""
    from lumenbox.bench import engine as experiment
    from lumenbox.models import catalogue

    model_dir = catalogue.resolve(model)
    _show(experiment.run(model_dir, batch, context, dtype, exact == "on", peer, threads), as_json)


@bench.command()
@click.option("--streams", default="64,256", callback=_numbers, show_default=True)
@click.option("--tokens", type=click.IntRange(min=1), default=200, show_default=True, help="Per stream.")
@click.option("--pairs", type=click.IntRange(0, 10), default=0, show_default=True, help="Also what bookkeeping adds.")
@options.as_json
def api(streams: tuple[int, ...], tokens: int, pairs: int, as_json: bool) -> None:
    """CPU time of the coordinator per streamed token; fake workers answer at once."""
    from lumenbox.bench import api as experiment

    _show(experiment.run(streams, tokens, pairs), as_json)


@bench.command()
@click.option("--model", default="tiny-random", show_default=True)
@click.option("--workers", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--streams", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--seconds", type=click.FloatRange(1, 3600), default=60, show_default=True)
@click.option("--faults", default="kill,hang,slow", callback=_faults, show_default=True)
@click.option("--at-once", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--every", "every_s", type=float, default=0.6, show_default=True, help="Seconds between faults.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--exact", type=click.Choice(["auto", "on", "off"]), default="on", show_default=True)
@click.option("--peer", type=click.Choice(["restart", "cold-start"]))
@options.as_json
def chaos(peer: str | None, as_json: bool, dtype: str, exact: str, **plan: Any) -> None:
    """Streams under faults, each compared token by token with its failure-free run; exit 1 unless that proves it."""
    from lumenbox.bench import chaos as experiment

    flags = ("--dtype", dtype, "--exact", exact)
    document = experiment.run(experiment.Plan(**plan, flags=flags), peer)
    _show(document, as_json)
    if doubt := _doubt(document, exact):
        raise LumenboxError(doubt)


def _doubt(document: dict[str, Any], exact: str) -> str:
    """Why a chaos run proves nothing, or the contrary; empty if it proves that no stream noticed."""
    harms = ["failed", "lost_tokens", "duplicated_tokens"] + ["different_tokens"] * (exact != "off")
    harm = [f"{name} {document[name]}" for name in harms if document[name]]
    faults = document["faults"]
    if harm:
        return f"streams were harmed: {', '.join(harm)}"
    if faults["verified"] < faults["done"] or not document["interrupted"]:
        return (
            f"nothing is proved: {faults['verified']} of {faults['done']} faults took hold"
            f" and {document['interrupted']} streams were interrupted"
        )
    return ""


@bench.command()
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--context", default="512,2048", callback=_numbers, show_default=True)
@options.as_json
def restore(model: str, context: tuple[int, ...], as_json: bool) -> None:
    """From sealed pages, beside from tokens: time until a context decodes again."""
    from lumenbox.bench import restore as experiment
    from lumenbox.models import catalogue

    _show(experiment.run(catalogue.resolve(model), context), as_json)


@bench.command()
@click.option("--workers", type=click.IntRange(min=2), default=64, show_default=True)
@click.option("--interrupted", type=click.IntRange(min=1), default=1000, show_default=True)
@options.as_json
def core(workers: int, interrupted: int, as_json: bool) -> None:
    """What the coordinator's decisions cost."""
    from lumenbox.bench import core as experiment

    _show(experiment.run(workers, interrupted), as_json)


@bench.command()
@click.option("--model", default="tiny-random", show_default=True)
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--streams", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--pairs", type=click.IntRange(2, 200), default=20, show_default=True)
@click.option("--flags", default="", help="Flags of the box that is measured.")
@click.option("--versus", default="--placement none", show_default=True, help="Flags of the box it is compared with.")
@options.as_json
def overhead(as_json: bool, **settings: Any) -> None:
    """CPU time per token of a whole box with some flags, beside one with others."""
    from lumenbox.bench import overhead as experiment

    _show(experiment.run(**settings), as_json)
