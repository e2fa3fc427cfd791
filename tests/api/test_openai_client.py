"""The openai client as an oracle: it takes what we send, also when it checks every field."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
from api_fakes import WORDS, Served
from openai.types.chat import ChatCompletionUserMessageParam

from lumenbox.coordinator.streams import Delta
from lumenbox.errors import RequestError

TEXT = "".join(WORDS)
HI = ChatCompletionUserMessageParam(role="user", content="hi")


@pytest.fixture
async def client(box: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=box.url + "/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as strict:
        yield strict


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=[HI], logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content == TEXT and answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == len(TEXT.encode())


async def test_chat_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny", messages=[HI], stream=True, logprobs=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert chunks[-1].usage is not None and chunks[-2].choices[0].finish_reason == "stop"


async def test_completion(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="tiny", prompt="hi", logprobs=2)
    assert answer.choices[0].text == TEXT


async def test_completion_stream(box: Served) -> None:
    """Not strict: openai's own type has no null finish_reason here, though its server sends one."""
    async with openai.AsyncOpenAI(base_url=box.url + "/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(model="tiny", prompt="hi", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == TEXT


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "lumenbox"


async def test_errors_have_their_class(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="other", messages=[HI])
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="tiny", messages=[HI], temperature=9)
    assert bad.value.param == "temperature"


async def test_an_error_in_a_stream_is_raised_after_heartbeats(box: Served, client: openai.AsyncOpenAI) -> None:
    box.service.steps = [[], [Delta(0, "a", [])], [], RequestError("lost", status=503, code="worker_lost")]
    stream = await client.chat.completions.create(model="tiny", messages=[HI], stream=True)
    with pytest.raises(openai.APIError) as lost:
        [chunk async for chunk in stream]
    assert lost.value.code == "worker_lost"
