"""A worker dies at every instruction that matters: in prefill, in decode, and while it recovers from the death before.

Each incarnation of a box gets its own death through LUMENBOX_FAULT, so one box goes through all of them.
"""

from __future__ import annotations

import pytest
from live_boxes import Answer, Body, Box, running
from live_load import assert_unchanged, chat, together

from lumenbox.worker.faults import POINTS

ELSEWHERE = ("reattach", "copy", "restore", "page_restored", "slots")  # the arena has tests of its own
STEP_POINTS = [point for point in POINTS if not point.startswith(ELSEWHERE)]
DECODE_POINTS = [point for point in STEP_POINTS if point != "prefill_chunk_done"]
REATTACH_POINTS = ["reattach_begun", "reattach_done"]
LONG_PROMPT = "lamp stone river night paper garden train window cloud bread " * 40
SMALL_CHUNKS = ("--max-num-batched-tokens", "64")


def faults(deaths: list[tuple[str, int]]) -> dict[str, str]:
    """One death for each incarnation from the first on: at the K-th passage of a point."""
    specs = [f"die_at:{point}:{k}:{incarnation}" for incarnation, (point, k) in enumerate(deaths, 1)]
    return {"LUMENBOX_FAULT": ",".join(specs)}


def assert_deaths(box: Box, deaths: int) -> None:
    assert box.whole().state()["counters"]["worker_deaths"] == deaths
    assert all(box.report(number)["cause"] == "signal" for number in range(1, deaths + 1))
    box.idle()


@pytest.fixture(scope="module")
def long_prompts(shared_box: Box) -> list[tuple[Body, Answer]]:
    """Prompts of thirty chunks, one greedy and one sampled, with their failure-free answers."""
    bodies = [
        chat(LONG_PROMPT, 24, logprobs=True, top_logprobs=2),
        chat("other " + LONG_PROMPT, 24, temperature=1, seed=1),
    ]
    return [(body, shared_box.stream(body)) for body in bodies]


def test_in_prefill_alone(long_prompts: list[tuple[Body, Answer]]) -> None:
    """One worker: each time the next incarnation re-attaches to a prompt that is half computed."""
    body, wanted = long_prompts[0]
    deaths = [(point, 2) for point in STEP_POINTS]
    with running(*SMALL_CHUNKS, workers=1, env=faults(deaths)) as box:
        answer = box.stream(body)
        assert_unchanged([answer], [wanted])
        assert answer.recoveries == len(deaths)
        assert_deaths(box, len(deaths))
        ways = [row["way"] for number in range(1, len(deaths) + 1) for row in box.report(number)["requests"]]
        assert ways == ["reattach"] * len(deaths)


def test_in_decode_and_while_recovering(bodies: list[Body], expected: list[Answer]) -> None:
    """One worker, all kinds of requests: deaths some steps apart, then deaths in the first step after a death."""
    apart = [(point, 8 + 3 * i) for i, point in enumerate(DECODE_POINTS)]
    at_once = [(point, 1) for point in (*REATTACH_POINTS, *DECODE_POINTS, *reversed(REATTACH_POINTS))]
    deaths = [("prefill_chunk_done", 1), *apart, *at_once]
    with running(workers=1, env=faults(deaths)) as box:
        assert_unchanged(together(box, bodies), expected, interrupted=len(bodies) - 2)
        assert_deaths(box, len(deaths))


def test_at_every_place_in_a_page(shared_box: Box) -> None:
    """Each life ends after a page and one token more, so sixteen of them end at every offset in a page."""
    body = chat(max_tokens=300)
    wanted = shared_box.stream(body)
    deaths = [("frame_written", 17)] * 16
    with running(workers=1, env=faults(deaths)) as box:
        answer = box.stream(body)
        assert_unchanged([answer], [wanted])
        assert answer.recoveries == 16
        rows = [row for number in range(1, 17) for row in box.report(number)["requests"]]
        assert {row["tokens_before"] % 16 for row in rows} == set(range(16))
        assert {row["way"] for row in rows} == {"reattach"}


@pytest.mark.parametrize("recovery", ["restart", "box"])
def test_on_two_workers_that_both_die_again_and_again(
    recovery: str, bodies: list[Body], expected: list[Answer], long_prompts: list[tuple[Body, Answer]]
) -> None:
    """Each worker goes through the same deaths at times of its own; the other may be its heir or dying as well."""
    deaths = [(point, 3 + 4 * i) for i, point in enumerate(STEP_POINTS)] + [(point, 1) for point in STEP_POINTS]
    with running("--recovery", recovery, *SMALL_CHUNKS, env=faults(deaths)) as box:
        answers = together(box, bodies + [body for body, _ in long_prompts])
        assert_unchanged(answers, expected + [wanted for _, wanted in long_prompts], interrupted=4)
        assert box.whole().state()["counters"]["worker_deaths"] >= 4
        ways = {row["way"] for number in reports(box) for row in box.report(number)["requests"]}
        assert ways <= ({"recompute"} if recovery == "restart" else {"recompute", "restore", "reattach"})
        box.idle()


def reports(box: Box) -> list[int]:
    return [event["report"] for event in box.events() if event["kind"] == "recovery"]


def test_in_the_middle_of_a_character_and_of_a_stop_string(shared_box: Box) -> None:
    """The frame that opens a character is the first incarnation's last, one inside the stop string the second's."""
    body, opened, stop_at, stop = awkward(shared_box)
    wanted = shared_box.stream(body)
    assert wanted.finish == {0: ["stop"]} and stop not in wanted.text[0]
    deaths = [("frame_written", opened + 1), ("frame_written", stop_at - opened)]
    with running(workers=1, env=faults(deaths)) as box:
        answer = box.stream(body)
        assert_unchanged([answer], [wanted])
        assert answer.recoveries == 2
        before = [box.report(number)["requests"][0]["tokens_before"] for number in (1, 2)]
        assert before == [wanted.usage["prompt_tokens"] + opened + 1, wanted.usage["prompt_tokens"] + stop_at + 1]


def awkward(box: Box) -> tuple[Body, int, int, str]:
    """A request; the index of a token that opens a character; a later one inside a stop string; that string.

    A token whose text is held back comes in one event with the token that completes it.
    """
    for seed in range(100):
        body = chat("odd", 160, temperature=1, seed=seed)
        plain = box.stream(body)
        ends = [sum(map(len, plain.pieces[: i + 1])) for i in range(len(plain.pieces))]
        opened = next((end - len(p) for end, p in zip(ends, plain.pieces, strict=True) if len(p) > 1), None)
        if opened is None or opened > 60:
            continue
        for inside in range(opened + 20, len(ends) - 3):
            piece = "".join(plain.texts[inside : inside + 3])
            if all(len(plain.pieces[i]) == 1 for i in range(inside, inside + 3)) and plain.text[0].count(piece) == 1:
                return {**body, "stop": [piece]}, opened, ends[inside + 1] - 1, piece
    raise AssertionError("no answer with a character in pieces and a unique stop string")
