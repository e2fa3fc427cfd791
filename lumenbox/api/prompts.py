"""Messages and prompts → token ids, in a bounded pool of threads, off the event loop.

A text is refused by its size before it costs any tokenising: `longest_token` bytes times the context is more than any
prompt that fits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from lumenbox.api.protocol import Message
from lumenbox.api.sampling import check_ids
from lumenbox.coordinator.streams import ModelInfo, Service
from lumenbox.errors import RequestError
from lumenbox.models.tokenizer import Tokenizer

MAX_PROMPTS = 64
MAX_TOKEN_BYTES = 32  # longer tokens are runs of blanks; no real prompt averages more
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""`developer` is OpenAI's newer word for system; chat templates know only the older one."""
Result = TypeVar("Result")


class PromptMaker:
    """Owns the tokeniser threads; `max_waiting` requests may queue for them.

    The context is asked of the service each time: it is final only once the box is ready.
    """

    def __init__(self, tokenizer: Tokenizer, service: Service, *, max_waiting: int) -> None:
        self.tokenizer = tokenizer
        self._service = service
        self._max_waiting = max_waiting
        self._waiting = 0
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        longest = max(map(len, tokenizer.token_bytes), default=1)
        self._bytes_per_token = min(max(longest, 1), MAX_TOKEN_BYTES)

    @property
    def _info(self) -> ModelInfo:
        return self._service.info

    @property
    def _max_bytes(self) -> int:
        return self._info.max_model_len * self._bytes_per_token

    def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def chat(self, messages: list[Message], template_kwargs: dict[str, Any]) -> list[int]:
        """A conversation's token ids, checked against the context."""
        plain = [plain_message(i, message) for i, message in enumerate(messages)]
        if len(messages) > self._info.max_model_len:  # every message costs at least a token
            raise self._too_long(None, "messages")
        self._check_size("".join(message["content"] or "" for message in plain), "messages")
        ids = await self._run(lambda: self.tokenizer.encode_chat(plain, **template_kwargs))
        return self._check_length(ids, "messages")

    async def text(self, text: str) -> list[int]:
        """A plain prompt's token ids, checked against the context."""
        self._check_size(text, "prompt")
        return self._check_length(await self._run(lambda: self.tokenizer.encode(text)), "prompt")

    async def completion(self, prompt: str | list[str | int | list[int]]) -> list[list[int]]:
        """The token ids of every prompt of a /v1/completions body."""
        return [await self._one(entry) for entry in split_prompts(prompt)]

    async def decode(self, ids: list[int]) -> str:
        """Text of token ids."""
        check_ids(ids, self._info.vocab_size, "tokens")
        return await self._run(lambda: self.tokenizer.decode(ids))

    async def _one(self, entry: str | list[int]) -> list[int]:
        if isinstance(entry, str):
            return await self.text(entry)
        self._check_length(entry, "prompt")
        return check_ids(entry, self._info.vocab_size, "prompt")

    async def _run(self, work: Callable[[], Result]) -> Result:
        if self._waiting >= self._max_waiting:
            raise RequestError("too many requests are being read", status=429, code="queue_full", retry_after_s=1)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting -= 1

    def _check_size(self, text: str, param: str) -> None:
        if len(text.encode()) > self._max_bytes:
            raise self._too_long(None, param)

    def _check_length(self, ids: list[int], param: str) -> list[int]:
        if not ids:
            raise RequestError(f"{param}: is empty", param=param)
        if len(ids) >= self._info.max_model_len:
            raise self._too_long(len(ids), param)
        return ids

    def _too_long(self, tokens: int | None, param: str) -> RequestError:
        size = "far more" if tokens is None else f"{tokens} tokens"
        message = f"the context is {self._info.max_model_len} tokens for prompt and answer; the prompt has {size}"
        return RequestError(message, code="context_length_exceeded", param=param)


def split_prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """OpenAI's four forms (text, texts, ids, lists of ids) as a list of prompts."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(isinstance(entry, int) for entry in prompt):
        return [[entry for entry in prompt if isinstance(entry, int)]]
    kinds = {type(entry) for entry in prompt}
    if len(kinds) != 1 or len(prompt) > MAX_PROMPTS:
        raise RequestError(f"prompt: 1 to {MAX_PROMPTS} prompts, all texts or all lists of token ids", param="prompt")
    return [entry for entry in prompt if not isinstance(entry, int)]


def plain_message(index: int, message: Message) -> dict[str, Any]:
    """A message as chat templates expect it. Raises RequestError that names its place in the list."""
    where = f"messages[{index}]"
    role = ROLES.get(message.role)
    if role is None:
        raise RequestError(f"{where}.role: must be one of {', '.join(ROLES)}", param=f"{where}.role")
    content = text_of(message, f"{where}.content")
    if content is None and not (role == "assistant" and message.tool_calls):
        raise RequestError(f"{where}.content: must be text", param=f"{where}.content")
    extra = {"name": message.name, "tool_calls": message.tool_calls, "tool_call_id": message.tool_call_id}
    return {"role": role, "content": content} | {key: value for key, value in extra.items() if value is not None}


def text_of(message: Message, where: str) -> str | None:
    """A message's text, its parts joined by line breaks."""
    if message.content is None or isinstance(message.content, str):
        return message.content
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise RequestError(f"{where}: only parts of type text are supported", param=where)
    return "\n".join(part.text or "" for part in message.content)
