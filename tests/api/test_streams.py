"""The bytes of a stream, as CONTRACT §3 has them."""

from __future__ import annotations

import asyncio
import json

import pytest
from api_fakes import WORDS, RawClient, Serve, Served, chat, events, sampled, until, words

from lumenbox.coordinator.streams import Delta
from lumenbox.errors import RequestError

TEXT = "".join(WORDS)


async def stream(box: Served, path: str, body: dict[str, object]) -> list[bytes]:
    client = await box.raw()
    await client.post(path, {**body, "stream": True})
    status, headers = await client.head()
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    chunks = await client.chunks()
    client.close()
    return chunks


async def test_chat_stream_is_one_write_per_event(box: Served) -> None:
    chunks = await stream(box, "/v1/chat/completions", chat())
    assert all(chunk.startswith(b"data: ") and chunk.endswith(b"\n\n") for chunk in chunks)
    *data, done = events(chunks)
    assert len(chunks) == len(data) + 1 and done == "[DONE]"
    assert len({(d["id"], d["created"], d["model"], d["object"]) for d in data}) == 1
    assert data[0]["id"].startswith("chatcmpl-") and data[0]["object"] == "chat.completion.chunk"
    deltas = [d["choices"][0]["delta"] for d in data]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    assert tuple(d["content"] for d in deltas[1:-1]) == WORDS
    assert [d["choices"][0]["finish_reason"] for d in data] == [None] * 6 + ["stop"]
    assert not any("usage" in d for d in data)
    assert box.service.streams[0].closed.is_set()


async def test_completion_stream_has_no_role(box: Served) -> None:
    *data, _ = events(await stream(box, "/v1/completions", {"prompt": "hi"}))
    assert data[0]["id"].startswith("cmpl-") and data[0]["object"] == "text_completion"
    assert "".join(d["choices"][0]["text"] for d in data) == TEXT
    assert data[-1]["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}


async def test_text_beside_the_finish_reason_is_sent(box: Served) -> None:
    box.service.steps = [[Delta(0, "a", sampled("a"))], [Delta(0, "b", sampled("b"), "length")]]
    *data, _ = events(await stream(box, "/v1/chat/completions", chat()))
    last = data[-1]["choices"][0]
    assert last["delta"] == {"content": "b"} and last["finish_reason"] == "length"


async def test_usage_chunk_only_when_asked(box: Served) -> None:
    body = chat(stream_options={"include_usage": True})
    *data, _ = events(await stream(box, "/v1/chat/completions", body))
    assert data[-1]["choices"] == []
    spent = len(TEXT.encode())
    prompt = data[-1]["usage"]["prompt_tokens"]
    assert data[-1]["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": spent,
        "total_tokens": prompt + spent,
    }
    assert all(d["usage"] is None for d in data[:-1])


async def test_continuous_usage(box: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *data, _ = events(await stream(box, "/v1/completions", {"prompt": "hi", "stream_options": options}))
    counts = [d["usage"]["completion_tokens"] for d in data]
    assert counts[0] == 3 and counts == sorted(counts) and counts[-1] == len(TEXT.encode())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_token_ids_and_prompt_ids(box: Served, path: str) -> None:
    body = chat("hé") if "chat" in path else {"prompt": "hé"}
    *data, _ = events(await stream(box, path, {**body, "return_token_ids": True}))
    choices = [d["choices"][0] for d in data]
    assert bytes(choices[0]["prompt_token_ids"]).decode().endswith("hé")
    assert not any("prompt_token_ids" in c for c in choices[1:])
    assert bytes(i for c in choices for i in c["token_ids"]).decode() == TEXT


async def test_several_choices(box: Served) -> None:
    *data, _ = events(await stream(box, "/v1/chat/completions", chat(n=3)))
    choices = [d["choices"][0] for d in data]
    for index in range(3):
        own = [c for c in choices if c["index"] == index]
        assert sum("role" in c["delta"] for c in own) == 1
        assert "".join(c["delta"].get("content", "") for c in own) == TEXT
        assert [c["finish_reason"] for c in own][-1] == "stop"


async def test_logprobs_in_both_forms(box: Served) -> None:
    *data, _ = events(await stream(box, "/v1/chat/completions", chat(logprobs=True, top_logprobs=1)))
    tokens = [t for d in data for t in (d["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert bytes(b for t in tokens for b in t["bytes"]).decode() == TEXT
    assert tokens[0]["top_logprobs"][1]["logprob"] == -9999.0
    *data, _ = events(await stream(box, "/v1/completions", {"prompt": "x", "logprobs": 1}))
    forms = [d["choices"][0]["logprobs"] for d in data if d["choices"][0]["logprobs"]]
    offsets = [o for form in forms for o in form["text_offset"]]
    assert offsets[:6] == [0, 1, 2, 3, 4, 5] and offsets[-1] == len(TEXT) - 1
    assert forms[0]["tokens"] == ["H", "e", "l"] and forms[0]["top_logprobs"][0]["H"] == -0.5


async def test_heartbeat_is_one_line_and_headers_come_first(box: Served) -> None:
    gate = asyncio.Event()
    box.service.steps = [gate, [], *words(1)]
    client = await box.raw()
    await client.post("/v1/chat/completions", chat(stream=True))
    assert (await client.head())[0] == 200  # while the first token is still to come
    gate.set()
    chunks = await client.chunks()
    assert chunks[0] == b": hb\n"
    assert events(chunks)[-1] == "[DONE]"
    client.close()


async def test_a_broken_stream_ends_with_an_error_event(box: Served) -> None:
    error = RequestError("the worker is lost", status=503, code="worker_lost")
    box.service.steps = [[Delta(0, "a", sampled("a"))], error]
    data = events(await stream(box, "/v1/chat/completions", chat()))
    expected = {"message": "the worker is lost", "type": "server_error", "param": None, "code": "worker_lost"}
    assert data[-1] == {"error": expected}
    assert not any(c["finish_reason"] for d in data[:-1] for c in d["choices"])
    assert box.service.streams[0].closed.is_set()


async def test_a_bug_ends_with_an_error_event_too(box: Served, caplog: pytest.LogCaptureFixture) -> None:
    box.service.steps = [[Delta(0, "a", [])], ZeroDivisionError("secret-prompt")]  # type: ignore[list-item]
    data = events(await stream(box, "/v1/chat/completions", chat()))
    assert data[-1]["error"]["code"] == "internal_error"
    assert "ZeroDivisionError" in caplog.text and "secret-prompt" not in caplog.text


async def test_recoveries_are_told(box: Served) -> None:
    box.service.recoveries = 2
    *data, _ = events(await stream(box, "/v1/chat/completions", chat(n=2)))
    assert [d.get("lumenbox") for d in data] == [None] * (len(data) - 1) + [{"recoveries": 2}]
    *data, _ = events(await stream(box, "/v1/chat/completions", chat(stream_options={"include_usage": True})))
    assert data[-1]["lumenbox"] == {"recoveries": 2} and data[-1]["usage"]["completion_tokens"] == len(TEXT.encode())
    _, headers, _ = await box.post("/v1/chat/completions", chat())
    assert headers["X-Lumenbox-Recoveries"] == "2"


async def test_plain_equals_stream(box: Served) -> None:
    body = chat(n=2, logprobs=True, return_token_ids=True)
    status, headers, answer = await box.post("/v1/chat/completions", body)
    assert status == 200 and "X-Lumenbox-Recoveries" not in headers
    assert [c["message"] for c in answer["choices"]] == [{"role": "assistant", "content": TEXT}] * 2
    assert [c["index"] for c in answer["choices"]] == [0, 1]
    assert bytes(answer["choices"][1]["token_ids"]).decode() == TEXT
    assert answer["choices"][1]["prompt_token_ids"] == box.service.specs[0].prompts[0]
    assert answer["usage"]["completion_tokens"] == 2 * len(TEXT.encode())


async def test_prompts_times_n_choices(box: Served) -> None:
    status, _, answer = await box.post("/v1/completions", {"prompt": ["a", "bc"], "n": 2, "return_token_ids": True})
    assert status == 200
    assert [c["prompt_token_ids"] for c in answer["choices"]] == [[97], [97], [98, 99], [98, 99]]


async def test_a_plain_answer_that_cannot_go_on(box: Served) -> None:
    box.service.steps = [RequestError("lost", status=503, code="worker_lost", retry_after_s=3)]
    status, headers, answer = await box.post("/v1/chat/completions", chat())
    assert (status, headers["Retry-After"], answer["error"]["code"]) == (503, "3", "worker_lost")


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_leaves_closes_its_stream(box: Served, streaming: bool) -> None:
    box.service.steps = [[Delta(0, "a", [])], asyncio.Event()]
    client = await box.raw()
    await client.post("/v1/chat/completions", chat(stream=streaming))
    if streaming:
        await client.reader.readuntil(b'"content":"a"')
    await until(lambda: bool(box.service.streams))
    client.reset()
    await asyncio.wait_for(box.service.streams[0].closed.wait(), 2)


async def test_submit_refusals_come_before_headers(serve: Serve) -> None:
    box = await serve()
    box.service.refuse = RequestError("full", status=429, code="queue_full", retry_after_s=7)
    client: RawClient = await box.raw()
    await client.post("/v1/chat/completions", chat(stream=True))
    status, headers = await client.head()
    assert (status, headers["retry-after"]) == (429, "7")
    body = json.loads(await client.reader.readexactly(int(headers["content-length"])))
    assert body["error"]["type"] == "rate_limit_error"
    client.close()
