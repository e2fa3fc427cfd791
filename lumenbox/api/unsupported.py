"""Fields that other servers give a meaning which lumenbox does not have (yet).

Silently ignoring one would change what the answer means, so anything but a value that asks for nothing is 400.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from lumenbox.errors import RequestError

NOTHING: tuple[Any, ...] = (None, False, "", [], {})
HARMLESS: dict[str, tuple[Any, ...]] = {
    "response_format": (None, {"type": "text"}),
    "tools": NOTHING,
    "tool_choice": (None, "none", "auto"),
    "functions": NOTHING,
    "function_call": (None, "none", "auto"),
    "best_of": (None, 1),
    "suffix": NOTHING,
    "echo": NOTHING,
    "modalities": (None, [], ["text"]),
    "audio": NOTHING,
    "web_search_options": (None,),
    "add_generation_prompt": (None, True),
    "continue_final_message": NOTHING,
    "add_special_tokens": (None, True),
    "chat_template": NOTHING,
    "documents": NOTHING,
    "use_beam_search": NOTHING,
    "prompt_logprobs": NOTHING,
    "prompt_embeds": NOTHING,
    "bad_words": NOTHING,
    "allowed_token_ids": NOTHING,
    "guided_json": NOTHING,
    "guided_regex": NOTHING,
    "guided_choice": NOTHING,
    "guided_grammar": NOTHING,
    "structured_outputs": NOTHING,
}
FIELDS = frozenset(HARMLESS) | {"user", "metadata"}
"""Names that are known, though no request structure carries them."""


def refuse_unsupported(fields: Mapping[str, msgspec.Raw]) -> None:
    """Raise RequestError(400) for the first field that asks for what we cannot do."""
    for name in HARMLESS.keys() & fields.keys():
        if not asks_for_nothing(fields[name], HARMLESS[name]):
            message = f"{name}: this value is not supported by lumenbox"
            raise RequestError(message, code="unsupported_parameter", param=name)


def asks_for_nothing(raw: msgspec.Raw, harmless: tuple[Any, ...]) -> bool:
    """Whether a field's value is one of those that change nothing."""
    try:
        return msgspec.json.decode(raw) in harmless
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
