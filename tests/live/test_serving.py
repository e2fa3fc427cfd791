"""One box and many requests: the model's own words, the same ones streamed or not, cached or not, alone or not."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from live_boxes import Answer, Body, Box, Clients, Connection
from live_load import POEM, chat, together

from lumenbox.models import cache
from lumenbox.models.tokenizer import Tokenizer

PROMPTS = [
    "The sea",
    "Once upon a time there was a lamp",
    "0 1 2 3 4 5 6 7",
    "日本語の文字",
    "éàü 😀🎉 ∑",
    "def main():",
    "a",
    "river stone table green letter window " * 12,
]


def test_greedy_output_is_that_of_model_generate(box: Box) -> None:
    """float32, eight prompts at once, against an unmodified transformers model."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = cache.folder_of("tiny-random")
    tokenizer = Tokenizer.load(folder)
    bodies = [chat(prompt, 40) for prompt in PROMPTS]
    answers = together(box, bodies)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        body = {"messages": [{"role": "user", "content": prompt}]}
        ids = box.request("POST", "/tokenize", body).json["tokens"]
        out = model.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False, eos_token_id=None)
        assert answer.token_ids[0] == out[0, len(ids) :].tolist(), prompt
        raw = b"".join(tokenizer.token_bytes[token] for token in answer.token_ids[0])
        assert answer.text[0] == raw.decode(errors="replace")


def test_side_by_side_as_alone(box: Box, bodies: list[Body], expected: list[Answer]) -> None:
    answers = together(box, bodies * 2)
    assert [answer.outcome for answer in answers] == [answer.outcome for answer in expected] * 2


def test_cold_or_cached_a_prompt_gives_the_same(box: Box) -> None:
    body = chat("Count: " + " ".join(f"item{i}" for i in range(70)) + f" {os.urandom(8).hex()}", 40)
    hits = cache_hits(box)
    first, *others = [box.stream(body) for _ in range(4)]
    assert [other.outcome for other in others] == [first.outcome] * 3
    assert cache_hits(box) >= hits + 64


def cache_hits(box: Box) -> float:
    """Prompt tokens that did not have to be computed."""
    text = box.request("GET", "/metrics").body.decode()
    return sum(float(n) for n in re.findall(r"^vllm:prefix_cache_hits_total\S* (\S+)$", text, re.MULTILINE))


def test_streamed_as_plain(box: Box, bodies: list[Body], expected: list[Answer]) -> None:
    for body, streamed in zip(bodies, expected, strict=True):
        reply = box.request("POST", "/v1/chat/completions", {**body, "return_token_ids": True})
        assert reply.status == 200
        choices = reply.json["choices"]
        assert {c["index"]: c["message"]["content"] for c in choices} == streamed.text
        assert {c["index"]: [c["finish_reason"]] for c in choices} == streamed.finish
        assert {c["index"]: c["token_ids"] for c in choices} == streamed.token_ids
        assert reply.json["usage"]["completion_tokens"] == streamed.usage["completion_tokens"]


def test_a_seed_repeats_and_no_seed_does_not(box: Box) -> None:
    sampled = chat(max_tokens=40, temperature=1)
    assert box.stream(sampled).text != box.stream(sampled).text
    assert box.stream({**sampled, "seed": 4}).text == box.stream({**sampled, "seed": 4}).text


def test_characters_are_whole_in_every_piece(box: Box) -> None:
    answers = [box.stream(chat(f"pieces {seed}", 200, temperature=1, seed=seed)) for seed in range(4)]
    assert any(len(ids) > 1 for answer in answers for ids in answer.pieces), "a character came in pieces"
    for answer in answers:
        assert not any("\ufffd" in text for text in answer.texts[:-1])
        assert len(answer.text[0].encode()) > len(answer.text[0])


def test_a_stop_string_over_the_border_of_two_pieces(box: Box, expected: list[Answer]) -> None:
    plain = expected[0]
    borders = [i for i in range(20, len(plain.texts) - 2) if len(plain.texts[i] + plain.texts[i + 1]) >= 3]
    for border in borders[::15]:
        stop = (plain.texts[border] + plain.texts[border + 1])[-3:]
        answer = box.stream(chat(stop=[stop]))
        assert answer.text[0] == plain.text[0][: plain.text[0].find(stop)]
        assert answer.finish == {0: ["stop"]} and answer.is_whole
        included = box.stream(chat(stop=[stop], include_stop_str_in_output=True))
        assert included.text[0] == answer.text[0] + stop


def test_how_a_stream_is_made(box: Box) -> None:
    connection = Connection(box.port, "POST", "/v1/chat/completions", {**chat(max_tokens=12), "stream": True})
    reply = connection.head()
    body = b"".join(connection.parts(reply))
    connection.close()
    assert reply.clean and reply.headers["content-type"].startswith("text/event-stream")
    assert re.fullmatch(rb"(data: \{.*\}\n\n)+data: \[DONE\]\n\n", body)
    assert body.count(b'"role"') == 1 and b'"usage":{' not in body
    assert body.count(b'"finish_reason":"length"') == 1


def test_more_requests_than_run_at_once_are_all_answered(box: Box) -> None:
    clients = Clients(box, [chat(f"{i}: {POEM}", 24) for i in range(150)])
    answers = clients.join()
    assert {answer.status for answer in answers} <= {200, 429, 503}
    assert all(answer.is_whole for answer in answers if answer.status == 200)
    assert sum(answer.status == 200 for answer in answers) >= 100


@pytest.mark.parametrize("word", ["temperature", "max_tokens", "n", "stop", "seed"])
def test_nonsense_beside_streams_harms_nobody(box: Box, word: str) -> None:
    clients = Clients(box, [chat(max_tokens=60)]).flowing()
    for value in (float("nan"), -1e400, [[]], {"a": 1}, 10**30):
        assert box.request("POST", "/v1/chat/completions", chat(**{word: value})).status == 400
    assert all(answer.is_whole for answer in clients.join())


# -- what the processes weigh ----------------------------------------------------------------------------------------


def test_the_coordinator_is_light_and_free_of_torch(box: Box) -> None:
    maps = Path(f"/proc/{box.pid}/maps").read_text()
    assert not re.search(r"torch|transformers|libcuda", maps)
    assert resident_kb(box.pid) < 150 << 10


def resident_kb(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1])


def test_a_worker_owns_little(box: Box) -> None:
    together(box, [chat(f"warm {i}", 40) for i in range(6)])
    for pid in box.pids():
        assert private_kb(pid) < 100 << 10, Path(f"/proc/{pid}/smaps_rollup").read_text()


def private_kb(pid: int) -> int:
    """Anonymous memory that a process shares with nobody: not its memfds, not what it has from the fork server."""
    total, anonymous = 0, 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-", line):
            anonymous = "memfd:" not in line
        elif line.startswith(("Private_Dirty:", "Private_Clean:")) and anonymous:
            total += int(line.split()[1])
    return total


def test_nothing_has_a_name_in_shared_memory(box: Box) -> None:
    assert not [name for name in os.listdir("/dev/shm") if "lumenbox" in name]
    fds = [os.readlink(f"/proc/{box.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{box.pid}/fd")]
    assert sum("memfd:lumenbox-kv" in fd for fd in fds) == 2
    assert sum("memfd:lumenbox-weights" in fd for fd in fds) == 1


def test_many_deaths_leave_no_zombie(box: Box) -> None:
    """The `box` fixture counts processes, zombies and descriptors before and after."""
    for number in range(6):
        before = box.incarnations()[number % 2]
        box.steer("chaos", kind="kill", worker=number % 2)
        box.replaced(number % 2, before)
