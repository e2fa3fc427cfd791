"""`lumenbox bench engine`: decode and prefill rates of our engine beside its peers, in turns, in one process.

Every contestant gets the same work: `batch` random prompts of `context` tokens, prefilled in chunks within a budget of
512 tokens beside the decodes that already run. Only the time when all of them decode counts. What compares our engine
with itself (attention left out, exact mode off) alternates step by step, so that a noisy neighbour hits both.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from lumenbox.core.batching import Batch, Chunk, Sequence
from lumenbox.core.requests import SamplingParams
from lumenbox.engine import architecture, loader
from lumenbox.engine.attention import ATTENTION_NAME
from lumenbox.engine.kv_pool import KvPool
from lumenbox.engine.model import Engine, build
from lumenbox.errors import StartupError
from lumenbox.memory import segment

TOKEN_BUDGET = 512  # tokens a step, the default of `up` on CPU
DECODE_TOKENS = 24  # tokens of each sequence while all decode
PREFILL_TOKENS = 1024
NO_ATTENTION = "lumenbox_bench_no_attention"

Prompts = list[list[int]]
Contestant = Callable[[Prompts, int], list[list[float]]]  # (prompts, new tokens) → times of each prompt's tokens


@dataclass(frozen=True, slots=True)
class Bench:
    """One model and all that is measured on it."""

    model_dir: Path
    report: Any
    engine: Engine
    inexact: Engine


def run(
    model_dir: Path,
    batches: Iterable[int],
    contexts: Iterable[int],
    dtype: str = "auto",
    exact: bool = False,
    peer: str | None = None,
    threads: int = 1,
    rounds: int = 2,
) -> dict[str, Any]:
    """Measure and return the JSON object of CONTRACT §6. `peer` is transformers, vllm or None; best of `rounds`."""
    batches, contexts = list(batches), list(contexts)
    tokens = max(max(batches) * (max(contexts) + _new_tokens(max(batches), max(contexts)) + 16), PREFILL_TOKENS + 16)
    bench = _load(model_dir, dtype, "on" if exact else "off", threads, tokens)
    contestants: dict[str, Contestant] = {"lumenbox": lambda prompts, new: _serve(bench.engine, prompts, new)}
    if peer:
        contestants[peer] = PEERS[peer](bench)
    rows = []
    for batch in batches:
        for context in contexts:
            rows.append(_row(bench, contestants, peer, batch, context, rounds))
    return {"schema": 1, "rows": rows, "prefill": _prefill(bench, rounds)}


def _load(model_dir: Path, dtype: str, exact: str, threads: int, tokens: int) -> Bench:
    fds: list[int] = []

    def allocate(size: int) -> int:
        fds.append(segment.create("bench", size))
        return fds[-1]

    try:
        report = loader.load(model_dir, allocate, dtype=dtype, exact=exact, threads=threads)
        pages = tokens // report.page.page_size + max(64, tokens // 256)
        engine = build(report, model_dir, fds[0], allocate(pages * report.page.page_bytes))
        return Bench(model_dir, report, engine, Engine(engine.model, engine.pool, exact=False, min_rows=1))
    finally:
        for fd in fds:
            os.close(fd)


def _row(
    bench: Bench, contestants: dict[str, Contestant], peer: str | None, batch: int, context: int, rounds: int
) -> dict[str, Any]:
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds):
        prompts = _prompts(bench, batch, context, seed=number)
        for name, contestant in contestants.items():
            rates[name].append(decode_rate(contestant(prompts, _new_tokens(batch, context))))
    ours = max(rates["lumenbox"])
    theirs = max(rates[peer]) if peer else 0.0
    seconds = _compare_steps(bench, batch, context)
    return {
        "batch": batch,
        "context": context,
        "dtype": bench.report.dtype,
        "exact": bench.report.exact,
        "threads": bench.report.threads,
        "tokens_per_s": round(ours, 2),
        "peer": peer,
        "peer_tokens_per_s": round(theirs, 2),
        "ratio": round(ours / theirs, 3) if theirs else 0,
        "no_attention_ratio": round(seconds["no_attention"] / seconds["step"], 3),
        "inexact_ratio": round(seconds["inexact"] / seconds["step"], 3),
        "step_ms": round(seconds["step"] * 1e3, 2),
    }


def _new_tokens(batch: int, context: int) -> int:
    """The first sequence goes on decoding while the last is prefilled, and DECODE_TOKENS beside it."""
    return 2 * -(-batch * context // TOKEN_BUDGET) + DECODE_TOKENS


def _prompts(bench: Bench, batch: int, context: int, seed: int) -> Prompts:
    draw = random.Random(seed)
    return [[draw.randrange(bench.engine.model.config.vocab_size) for _ in range(context)] for _ in range(batch)]


def decode_rate(times: list[list[float]]) -> float:
    """Tokens a second while every sequence decodes: from the last first token to the first last one."""
    start, stop = max(each[0] for each in times), min(each[-1] for each in times)
    return sum(start < moment <= stop for each in times for moment in each) / (stop - start)


# -- our engine ------------------------------------------------------------------------------------------------------


def _sequences(pool: KvPool, prompts: Prompts, new_tokens: int) -> list[Sequence]:
    """Greedy requests with all the pages that they will need."""
    params, page, taken, sequences = SamplingParams(max_tokens=new_tokens, temperature=0.0), pool.page_size, 0, []
    for rid, prompt in enumerate(prompts):
        count = -(-(len(prompt) + new_tokens) // page)
        sequences.append(Sequence(rid, 0, params, list(prompt), len(prompt), list(range(taken, taken + count))))
        taken += count
    return sequences


def _serve(engine: Engine, prompts: Prompts, new_tokens: int) -> list[list[float]]:
    sequences = _sequences(engine.pool, prompts, new_tokens)
    times: list[list[float]] = [[] for _ in sequences]
    while batch := _plan(sequences, new_tokens):
        _step(engine, batch, times)
    return times


def _plan(sequences: list[Sequence], new_tokens: int) -> list[Chunk]:
    """Decodes first, then prefill chunks, within the token budget."""
    chunks: list[Chunk] = []
    left = TOKEN_BUDGET
    for seq in sorted(sequences, key=lambda seq: (seq.num_generated == 0, seq.rid)):
        length = min(left, len(seq.tokens) - seq.num_computed)
        if length and seq.num_generated < new_tokens:
            chunks.append(Chunk(seq, seq.num_computed, length))
            left -= length
    return chunks


def _step(engine: Engine, chunks: list[Chunk], times: list[list[float]]) -> None:
    sampling = [chunk.seq for chunk in chunks if chunk.samples]
    drawn = engine.execute(Batch(chunks))
    now = time.perf_counter()
    for chunk in chunks:
        chunk.seq.num_computed += chunk.length
    for seq, sampled in zip(sampling, drawn, strict=True):
        seq.tokens.append(sampled.token)
        times[seq.rid].append(now)


def _compare_steps(bench: Bench, batch: int, context: int, repeats: int = 15) -> dict[str, float]:
    """Median seconds of the same decode step: as it is, inexact, and with attention left out."""
    sequences = _sequences(bench.engine.pool, _prompts(bench, batch, context, seed=0), 1)
    decode = Batch([Chunk(seq, context - 1, 1) for seq in sequences])
    ways: dict[str, list[float]] = {"step": [], "inexact": [], "no_attention": []}
    for _ in range(repeats):
        ways["step"].append(_timed(lambda: bench.engine.execute(decode)))
        ways["inexact"].append(_timed(lambda: bench.inexact.execute(decode)))
        with _attention(bench.engine.model, NO_ATTENTION):
            ways["no_attention"].append(_timed(lambda: bench.engine.execute(decode)))
    return {way: statistics.median(seconds) for way, seconds in ways.items()}


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@contextmanager
def _attention(model: Any, name: str) -> Iterator[None]:
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def no_attention(_module: Any, query: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    """What a forward costs without attention: the queries themselves come back."""
    return query.transpose(1, 2), None


def _prefill(bench: Bench, rounds: int) -> dict[str, Any]:
    """Tokens a second of a long prompt in chunks of the budget, beside transformers' plain forward of it whole."""
    prompts = _prompts(bench, 1, PREFILL_TOKENS, seed=0)
    plain_model, ids = _transformers_model(bench), torch.tensor(prompts)

    @torch.inference_mode()
    def plain() -> None:
        plain_model(ids, use_cache=False, logits_to_keep=1)

    def paged() -> None:
        _serve(bench.engine, prompts, 1)

    ours, theirs = zip(*((_timed(paged), _timed(plain)) for _ in range(rounds + 2)), strict=True)
    return {
        "tokens": PREFILL_TOKENS,
        "tokens_per_s": round(PREFILL_TOKENS / min(ours), 1),
        "plain_forward_tokens_per_s": round(PREFILL_TOKENS / min(theirs), 1),
    }


# -- peers -----------------------------------------------------------------------------------------------------------


def _transformers_model(bench: Bench) -> Any:
    """transformers' own model of the folder, with its own copy of the weights."""
    with architecture.quiet():
        dtype = getattr(torch, bench.report.dtype)
        return transformers.AutoModelForCausalLM.from_pretrained(bench.model_dir, dtype=dtype).eval()


def _transformers(bench: Bench) -> Contestant:
    """transformers' continuous batching, with the same token budget and blocks enough for all prompts."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model = _transformers_model(bench)

    def serve(prompts: Prompts, new_tokens: int) -> list[list[float]]:
        blocks = len(prompts) * -(-(len(prompts[0]) + new_tokens) // 256) + 8
        with architecture.quiet():
            outputs = model.generate_batch(
                prompts,
                generation_config=transformers.GenerationConfig(
                    max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
                ),
                continuous_batching_config=ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=TOKEN_BUDGET),
                record_timestamps=True,
            )
        return [output.timestamps for output in outputs.values()]

    return serve


def _vllm(bench: Bench) -> Contestant:
    """vLLM on CPU, where it is installed. It tells no token times, so its decodes are the difference of two runs."""
    if not importlib.util.find_spec("vllm"):
        raise StartupError("--peer vllm: vllm is not installed in this environment")
    vllm = importlib.import_module("vllm")
    llm = vllm.LLM(str(bench.model_dir), dtype=bench.report.dtype, max_num_batched_tokens=TOKEN_BUDGET)

    def seconds(prompts: Prompts, new_tokens: int) -> float:
        params = vllm.SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        return _timed(lambda: llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False))

    def serve(prompts: Prompts, new_tokens: int) -> list[list[float]]:
        first, last = seconds(prompts, 1), seconds(prompts, new_tokens)
        each = (last - first) / (new_tokens - 1)
        return [[each * token for token in range(new_tokens)] for _ in prompts]

    return serve


PEERS: dict[str, Callable[[Bench], Contestant]] = {"transformers": _transformers, "vllm": _vllm}
transformers.AttentionInterface.register(NO_ATTENTION, no_attention)
