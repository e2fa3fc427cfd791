"""Every field of CONTRACT §3: what is taken, what it becomes, what is refused and by which name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from api_fakes import EOS, Serve, Served, chat
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lumenbox.api.protocol import ChatBody, CompletionBody, decode
from lumenbox.errors import RequestError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES = Path(__file__).parents[2].parent / "shared" / "cases" / "bodies"

BAD: list[tuple[str, Any]] = [
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", "hot"), ("temperature", []), ("temperature", True),
    ("top_p", 0), ("top_p", 1.5), ("top_p", -1), ("presence_penalty", 1e9), ("frequency_penalty", -2.1),
    ("repetition_penalty", 0), ("min_p", 1.1), ("min_p", -0.1), ("top_k", -2), ("top_k", 10**12), ("top_k", 1.5),
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "8"), ("max_tokens", True),
    ("max_tokens", -(2**63)), ("max_completion_tokens", 0), ("min_tokens", -1), ("min_tokens", 9),
    ("n", 0), ("n", -1), ("n", 9), ("n", 2.5), ("n", 10**30), ("n", -(10**30)), ("seed", 2**70), ("seed", -(2**64)),
    ("seed", "x"), ("seed", 1.5), ("seed", False), ("top_logprobs", 21), ("top_logprobs", -1), ("logprobs", 3),
    ("stop", 5), ("stop", [1]), ("stop", ["a"] * 5), ("stop", ""), ("stop", ["a", ""]), ("stop", {"a": 1}),
    ("stop_token_ids", [257]), ("stop_token_ids", [-1]), ("stop_token_ids", [10**30]), ("stop_token_ids", 5),
    ("logit_bias", {"AI": -100}), ("logit_bias", {"257": 5}), ("logit_bias", {"-1": 5}), ("logit_bias", {"5": "x"}),
    ("logit_bias", {"5": 101}), ("logit_bias", [[5, 1]]), ("logit_bias", {"\u0661": 1}), ("logit_bias", {"": 1}),
    ("stream", "yes"), ("stream", 1), ("stream_options", {"include_usage": True}), ("stream_options", 5),
    ("ignore_eos", 1), ("include_stop_str_in_output", "no"), ("return_token_ids", 0), ("priority", 2**40),
    ("chat_template_kwargs", []), ("user", 5),
    ("response_format", {"type": "json_object"}), ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("tools", [{"type": "function"}]), ("tool_choice", "required"), ("tool_choice", {"type": "function"}),
    ("functions", [{}]), ("function_call", {"name": "f"}), ("best_of", 2), ("suffix", "x"), ("echo", True),
    ("modalities", ["audio"]), ("guided_json", {}  | {"a": 1}), ("prompt_logprobs", 1), ("use_beam_search", True),
    ("messages", []), ("messages", None), ("messages", "hi"), ("messages", {}),
]  # fmt: skip
BAD_MESSAGES: list[tuple[Any, str]] = [
    (None, "messages[0]"), ([], "messages[0]"), ("x", "messages[0]"), ({}, "messages[0].role"),
    ({"role": "user"}, "messages[0].content"), ({"content": "x"}, "messages[0].role"),
    ({"role": "boss", "content": "x"}, "messages[0].role"), ({"role": "user", "content": 5}, "messages[0].content"),
    ({"role": "user", "content": {"a": 1}}, "messages[0].content"), ({"role": 1, "content": ""}, "messages[0].role"),
    ({"role": "user", "content": None}, "messages[0].content"), ({"role": "assistant"}, "messages[0].content"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content"),
    ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content"),
    ({"role": "assistant", "content": "x", "tool_calls": 5}, "messages[0].tool_calls"),
]  # fmt: skip
GOOD: list[tuple[str, Any, str, Any]] = [
    ("temperature", 0, "temperature", 0.0), ("temperature", None, "temperature", 1.0), ("top_p", 1, "top_p", 1.0),
    ("top_k", -1, "top_k", 0), ("top_k", 0, "top_k", 0), ("top_k", 40, "top_k", 40), ("min_p", 0.5, "min_p", 0.5),
    ("presence_penalty", -2, "presence_penalty", -2.0), ("frequency_penalty", 1.5, "frequency_penalty", 1.5),
    ("repetition_penalty", 1.3, "repetition_penalty", 1.3), ("repetition_penalty", None, "repetition_penalty", 1.0),
    ("max_tokens", 7, "max_tokens", 7), ("max_tokens", 10**9, "max_tokens", 2048 - 8),
    ("max_tokens", None, "max_tokens", 2048 - 8), ("max_completion_tokens", 5, "max_tokens", 5),
    ("min_tokens", 3, "min_tokens", 3), ("ignore_eos", True, "end_ids", ()), ("ignore_eos", None, "end_ids", (EOS,)),
    ("stop_token_ids", [5, EOS, 5], "end_ids", (EOS, 5)), ("logprobs", None, "logprobs", -1),
    ("logprobs", False, "logprobs", -1), ("logprobs", True, "logprobs", 0), ("top_logprobs", 0, "logprobs", -1),
    ("logit_bias", {"7": 1, "5": -100.0}, "logit_bias", ((5, -100.0), (7, 1.0))), ("logit_bias", {}, "logit_bias", ()),
]  # fmt: skip
HARMLESS = [
    ("tools", []), ("tools", None), ("tool_choice", "none"), ("tool_choice", "auto"), ("best_of", 1), ("suffix", ""),
    ("response_format", {"type": "text"}), ("user", "me"), ("metadata", {"a": "b"}), ("stream_options", None),
    ("modalities", ["text"]), ("chat_template_kwargs", {"enable_thinking": False}), ("stream", None),
]  # fmt: skip


def name(value: Any) -> str:
    return repr(value)[:30]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("field", "value"), BAD, ids=name)
async def test_bad_values_name_their_field(box: Served, field: str, value: Any, streaming: bool) -> None:
    body = {**chat(max_tokens=8, stream=streaming), field: value}
    if field == "stream_options" and streaming and value != 5:
        return
    if field == "max_completion_tokens":
        del body["max_tokens"]
    if field == "top_logprobs":
        body["logprobs"] = True
    status, _, answer = await box.post(CHAT, body)
    assert status == 400 and not box.service.specs
    error = answer["error"]
    assert (error["param"] or "").startswith(field) and field in error["message"], error
    assert error["type"] == "invalid_request_error" and len(error["message"]) < 400


@pytest.mark.parametrize(("message", "param"), BAD_MESSAGES, ids=name)
async def test_bad_messages_name_their_place(box: Served, message: Any, param: str) -> None:
    status, _, answer = await box.post(CHAT, {"messages": [message]})
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize(("field", "value", "becomes", "expected"), GOOD, ids=name)
async def test_good_values_reach_the_sampler(box: Served, field: str, value: Any, becomes: str, expected: Any) -> None:
    assert (await box.post(CHAT, chat(**{field: value})))[0] == 200
    assert getattr(box.service.specs[0].params, becomes) == expected


@pytest.mark.parametrize(("field", "value"), HARMLESS, ids=name)
async def test_harmless_values_are_taken_in_silence(box: Served, field: str, value: Any) -> None:
    status, headers, _ = await box.post(CHAT, chat(**{field: value}))
    assert status == 200 and "x-lumenbox-ignored-params" not in headers


async def test_the_rest_of_the_specification(box: Served) -> None:
    fields = {"n": 2, "seed": -1, "stop": ["a", "b", "a"], "include_stop_str_in_output": True, "priority": 3}
    assert (await box.post(CHAT, chat(**fields, logprobs=True, top_logprobs=20)))[0] == 200
    spec = box.service.specs[0]
    assert (spec.n, spec.seed, spec.stop, spec.include_stop, spec.priority) == (2, 2**64 - 1, ("a", "b"), True, 3)
    assert spec.params.logprobs == 20
    await box.post(CHAT, chat(stop="x", max_tokens=9, max_completion_tokens=4))
    spec = box.service.specs[1]
    assert (spec.seed, spec.stop, spec.params.max_tokens) == (None, ("x",), 4)


async def test_unknown_fields_are_named(box: Served) -> None:
    extra = {"zeta": 1, "nested": [[[{}]]], "bad\r\nname": 1, "long" * 400: 1}
    status, headers, _ = await box.post(CHAT, chat(**extra))
    assert status == 200 and headers["x-lumenbox-ignored-params"].startswith("zeta, nested, long")
    assert len(headers["x-lumenbox-ignored-params"]) <= 512


async def test_roles_and_parts(box: Served) -> None:
    messages = [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "refusal": None},
        {"role": "tool", "content": "d", "tool_call_id": "1", "name": "f"},
    ]
    assert (await box.post(CHAT, {"messages": messages}))[0] == 200
    assert bytes(box.service.specs[0].prompts[0]) == b"<system>a<user>b\nc<assistant>None<tool>d"


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [("ab", [[97, 98]]), (["a", "b"], [[97], [98]]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
async def test_prompt_forms(box: Served, prompt: Any, ids: list[list[int]]) -> None:
    assert (await box.post(COMPLETIONS, {"prompt": prompt}))[0] == 200
    assert box.service.specs[0].prompts == ids
    assert box.service.specs[0].params.max_tokens == 16


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [[]],
        None,
        5,
        ["a", 1],
        [[1], "a"],
        [True],
        [1.5],
        [257],
        [-1],
        [[1, 257]],
        ["a"] * 65,
        {"a": 1},
        [[[1]]],
    ],
    ids=name,
)
async def test_bad_prompts(box: Served, prompt: Any) -> None:
    status, _, answer = await box.post(COMPLETIONS, {"prompt": prompt})
    assert status == 400 and answer["error"]["param"].startswith("prompt"), answer


@pytest.mark.parametrize("value", [21, -1, True, 1.5])
async def test_completion_logprobs(box: Served, value: Any) -> None:
    assert (await box.post(COMPLETIONS, {"prompt": "a", "logprobs": value}))[0] == 400
    assert (await box.post(COMPLETIONS, {"prompt": "a", "logprobs": None, "min_tokens": 30}))[0] == 200
    assert box.service.specs[0].params.max_tokens == 30


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("size", [2048, 100_000])
async def test_a_prompt_over_the_context(box: Served, size: int, streaming: bool) -> None:
    for path, body in (
        (CHAT, chat("x" * size)),
        (COMPLETIONS, {"prompt": "x" * size}),
        (COMPLETIONS, {"prompt": [1] * size}),
    ):
        status, _, answer = await box.post(path, {**body, "stream": streaming})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert (await box.post(CHAT, {"messages": [{"role": "user", "content": ""}] * 3000}))[0] == 400


async def test_the_longest_prompt_leaves_one_token(box: Served) -> None:
    assert (await box.post(COMPLETIONS, {"prompt": "x" * 2047}))[0] == 200
    assert box.service.specs[0].params.max_tokens == 1


async def test_max_tokens_is_clamped_by_the_shortest_prompt(box: Served) -> None:
    await box.post(COMPLETIONS, {"prompt": ["x" * 2000, "y"], "max_tokens": 5000})
    assert box.service.specs[0].params.max_tokens == 2047


async def test_defaults_of_the_model(serve: Serve) -> None:
    box = await serve(generation_defaults={"temperature": 0.6, "top_k": 20})
    await box.post(CHAT, chat(temperature=0))
    await box.post(CHAT, chat(top_k=None))
    first, second = (spec.params for spec in box.service.specs)
    assert (first.temperature, first.top_k) == (0, 20) and (second.temperature, second.top_k) == (0.6, 20)


@pytest.mark.parametrize("model", ["no-such-model", "", "../../etc/passwd", "x" * 10_000])
async def test_unknown_model(box: Served, model: str) -> None:
    status, _, answer = await box.post(CHAT, {**chat(), "model": model})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")
    assert "'tiny'" in answer["error"]["message"] and len(answer["error"]["message"]) < 400


@pytest.mark.parametrize(
    "body",
    [
        *(
            b"",
            b"{",
            b"null",
            b"[]",
            b'"x"',
            b"5",
            b"{'a':1}",
            b'{"a":"\xff"}',
            b"\x00",
            b'{"a":1}{"b":2}',
            b"\xef\xbb\xbf{}",
        ),
        *(b'{"messages":[{"role":"user","content":"%s"}]}' % s for s in (rb"\ud83d", rb"a\udcf0b", b"\xed\xa0\xbd")),
        *(
            b'{"messages":[{"role":"user","content":"x"}],%s}' % s
            for s in (b'"temperature":NaN', b'"temperature":1e400')
        ),
        b'{"messages":[{"role":"user","content":"x"}],"seed":' + b"9" * 5000 + b"}",
        b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages":[{"role":"user","content":"x"}],"zeta":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages":[{"role":"user","content":"x"}],"tools":' + b"[" * 900 + b"]" * 900 + b"}",
    ],
    ids=name,
)
async def test_not_json(box: Served, body: bytes) -> None:
    status, _, answer = await box.post(CHAT, body)
    assert status == 400 and len(answer["error"]["message"]) < 400


async def test_two_mib_of_blanks_are_fine(box: Served) -> None:
    client = await box.raw()
    await client.post(CHAT, b" " * (2 << 20) + json.dumps(chat()).encode())
    assert (await client.head())[0] == 200
    client.close()


@pytest.mark.skipif(not BODIES.is_dir(), reason="no ../shared")
async def test_the_bodies_of_the_cases(box: Served) -> None:
    for line in (BODIES / "INDEX.tsv").read_text().splitlines():
        file, allowed = line.split("\t")
        data = (BODIES / file).read_bytes().replace(b'"MODEL"', b'"tiny"')
        status, _, answer = await box.post(CHAT, data)
        assert str(status) in allowed.split(), (file, answer)
        assert (status == 200) == ("error" not in answer)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KNOWN = st.sampled_from(sorted({*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__, "tools", "echo"}))


@given(
    fields=st.dictionaries(KNOWN, JSON, max_size=4),
    path=st.sampled_from([CHAT, COMPLETIONS, "/tokenize", "/detokenize"]),
)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_random_fields_never_make_a_500(box: Served, fields: dict[str, Any], path: str) -> None:
    base = {CHAT: chat(), COMPLETIONS: {"prompt": "x"}, "/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [65]}}
    data = json.dumps({**base[path], **fields, "stream": False}).encode()
    status, _, _ = await box.post(path, data)
    assert status in (200, 400, 404)


@given(data=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_random_bytes_are_a_body_or_a_refusal(data: bytes) -> None:
    for kind in (ChatBody, CompletionBody):
        try:
            decode(data, kind)  # type: ignore[type-var]
        except RequestError as problem:
            assert problem.status == 400
