"""Every message comes out of msgpack as it went in, by the decoder of its direction."""

from __future__ import annotations

import msgspec
import pytest

from lumenbox.core.batching import Report
from lumenbox.core.requests import Sampled, SamplingParams
from lumenbox.memory.layout import LayerSlice, LoadReport, PageLayout, WeightEntry
from lumenbox.wire import frames

PARAMS = SamplingParams(
    max_tokens=9,
    temperature=0.7,
    logit_bias=((5, -100.0), (7, 1.5)),
    end_ids=(2, 0),
    seed=2**63 - 1,
    choice=7,
    logprobs=3,
)
PLACED = frames.Placed(1, 2, PARAMS, [1, 2, 3], 2, [9, 8], 33, -1, True, [(7, 8)], 1, [2**32 - 1])
LOADED = LoadReport(
    weights=(WeightEntry("a.b", 64, (2, 3), "bfloat16"),),
    weight_bytes=128,
    page=PageLayout(16, 4096, "float32", (LayerSlice(0, 2, 64), LayerSlice(2048, 1, 64))),
    dtype="float32",
    threads=1,
    numeric_class="x86",
    identity="00ff",
    exact=True,
    inexact_reason="",
    min_rows=4,
)
STEP = frames.Step(
    incarnation=3, step=17, started_ns=2**62, seconds=0.25, decodes=2, prefill_tokens=16, context_tokens=99, running=2,
    waiting=1, free_pages=5, cached_pages=3, preemptions=1, admitted=[(1, 0, 16)],
    tokens=[(1, 0, [Sampled(5, -0.25, ((5, -0.25), (6, -1.5)))]), (2, 1, [Sampled(7)])], progress=[(3, 32)],
    taken=[(1, [4, 5])], hashed=[(4, b"\x00\xff" * 8)], evicted=[9], preempted=[6], finished=[(2, 1, "stop")],
    dropped=[(8, 0)], replaced=[(1, 0, 4)], sealed=[(1, 0, 2, 7)], quiet=[(3, 1)], restored=[(4, 2, 5, 4096, 0.5)],
)  # fmt: skip
TO_WORKER = [
    frames.Boot(
        1, 3, "/m", LOADED, frames.SchedulerLimits(8, 512, 4096), "cpu", ["die_at:x"], [PLACED], [(1, b"h" * 16)]
    ),
    frames.Assign(PLACED),
    frames.Cancel(1, 0),
    frames.Reserve(1, 2, 3, [(4, 5), (6, 7)]),
    frames.Release(1, 2),
    frames.Preload(PLACED),
    frames.SealRate(-1.0),
    frames.Disturb("slow", 2.5),
    frames.Stop(),
]
FROM_WORKER = [frames.Ready(2, 100, True), frames.Failed("no\nmemory"), STEP]
FORK_SERVER = [frames.Warm(0.5), frames.Forked(3, 4242), frames.NotForked(3, "no"), frames.Exited(3, 4242, -9)]


@pytest.mark.parametrize(
    ("message", "union"),
    [
        *((m, frames.ToWorker) for m in TO_WORKER),
        *((m, frames.FromWorker) for m in FROM_WORKER),
        *((m, frames.FromForkServer) for m in FORK_SERVER),
        (frames.Fork(1, "worker", {"n": 1}, {"K": "V"}), frames.Fork),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, msgspec.Struct) else "",
)
def test_round_trip(message: msgspec.Struct, union: object) -> None:
    assert msgspec.msgpack.decode(frames.encode(message), type=union) == message


def test_the_lists_above_are_complete() -> None:
    assert {type(m) for m in TO_WORKER} == set(frames.ToWorker.__args__)
    assert {type(m) for m in FROM_WORKER} == set(frames.FromWorker.__args__)
    assert {type(m) for m in FORK_SERVER} == set(frames.FromForkServer.__args__)


def test_a_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(frames.encode(frames.Stop()), type=frames.FromWorker)


def test_a_step_frame_has_every_list_of_the_schedulers_report() -> None:
    lists = set(Report.__dataclass_fields__)
    assert lists <= set(frames.Step.__struct_fields__)
    told = {name for name in frames.Step.__struct_fields__ if isinstance(getattr(STEP, name), list)}
    assert told - lists == {"sealed", "quiet", "restored"}, "those are the worker's own, about the arena"
