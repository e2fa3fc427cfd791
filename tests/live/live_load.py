"""Requests whose answers a failure must not change: one of every kind that carries state from token to token."""

from __future__ import annotations

import threading
from typing import Any

from live_boxes import DEADLINE_S, Answer, Body, Box, Clients, wait_until

POEM = "Name the things that a lighthouse keeper sees in one night, one to a line."


def chat(text: str = POEM, max_tokens: int = 120, **fields: Any) -> Body:
    """A request; greedy unless it says otherwise, and never ended by the model."""
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


def varied(max_tokens: int = 120) -> list[Body]:
    """Greedy and sampled, penalties, n, logprobs, min_tokens with end tokens, stop strings, characters in pieces."""
    warm: Body = {"temperature": 1.0, "max_tokens": max_tokens}
    return [
        chat(max_tokens=max_tokens),
        chat("sampled", seed=2**40 + 7, top_p=0.9, **warm),
        chat("penalised", seed=3, presence_penalty=1.5, frequency_penalty=0.8, repetition_penalty=1.1, **warm),
        chat("siblings", seed=5, n=3, min_p=0.02, **warm),
        chat("measured", max_tokens=max_tokens, logprobs=True, top_logprobs=3),
        chat("patient", seed=9, min_tokens=max_tokens // 2, stop_token_ids=list(range(97, 123)), **warm),
        chat("interrupted", seed=11, top_k=40, stop=["th", "ou", "日本"], min_tokens=max_tokens // 2, **warm),
        chat("biased " * 60, max_tokens=max_tokens, logit_bias={"101": 2, "116": -3}, frequency_penalty=0.6),
    ]


def alone(box: Box, bodies: list[Body]) -> list[Answer]:
    """What each request gives on a box where nothing happens."""
    answers = [box.stream(body) for body in bodies]
    assert all(answer.is_whole and answer.recoveries == 0 for answer in answers)
    return answers


def together(box: Box, bodies: list[Body]) -> list[Answer]:
    return Clients(box, bodies).join()


def assert_unchanged(answers: list[Answer], expected: list[Answer], *, interrupted: int = 1) -> None:
    """Each answer is the failure-free one, and enough of them were interrupted for that to mean something."""
    assert len(answers) == len(expected)
    for number, (answer, wanted) in enumerate(zip(answers, expected, strict=True)):
        assert answer.is_whole, (number, answer.status, answer.error)
        assert answer.outcome == wanted.outcome, (number, difference(answer, wanted))
        assert len(answer.ids) == 1
    hit = sum(answer.recoveries > 0 for answer in answers)
    assert hit >= interrupted, f"{hit} streams were interrupted: the fault missed, nothing is proved"


def difference(answer: Answer, wanted: Answer) -> str:
    """Where two answers part."""
    for choice, ids in wanted.token_ids.items():
        got = answer.token_ids.get(choice, [])
        at = next((i for i, (a, b) in enumerate(zip(got, ids, strict=False)) if a != b), min(len(got), len(ids)))
        if got != ids:
            return f"choice {choice}, token {at}: {got[at : at + 5]} for {ids[at : at + 5]}, {len(got)}/{len(ids)}"
    return f"same ids, other {[a for a, b in zip(answer.outcome, wanted.outcome, strict=True) if a != b]}"


class Load:
    """Clients that ask again and again until told to stop; each answer is compared with the failure-free one."""

    def __init__(self, box: Box, bodies: list[Body], expected: list[Answer]) -> None:
        self._stop = threading.Event()
        self.answers: list[tuple[Answer, Answer]] = []
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(box, body, wanted), daemon=True)
            for body, wanted in zip(bodies, expected, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, box: Box, body: Body, wanted: Answer) -> None:
        try:
            while not self._stop.is_set():
                self.answers.append((box.stream(body), wanted))
        except BaseException as error:  # noqa: BLE001 (told by `end`)
            self._errors.append(error)

    def running(self, box: Box) -> Load:
        wait_until(lambda: box.load()["running"] >= 3, "a box under load")
        return self

    def more(self, count: int) -> Load:
        """So many answers more."""
        enough = len(self.answers) + count
        wait_until(lambda: self._errors or len(self.answers) >= enough, "more answers")
        return self

    def end(self, *, interrupted: int) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "a client hangs"
        assert not self._errors, self._errors
        got, wanted = zip(*self.answers, strict=True)
        assert_unchanged(list(got), list(wanted), interrupted=interrupted)
