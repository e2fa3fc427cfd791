"""Chat messages → the prompt's text, by the model's own jinja template, in a sandbox.

Which control tokens a prompt has is the template's to say, never the user's. So every string of the request that
holds the text of a special token, or a part of one at either end, is marked with a guard character before rendering.
The guard parts the text where a special token would otherwise be read, whichever pieces the template joins, and is
taken out again when the prompt is cut into control tokens and plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from itertools import chain
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lumenbox.errors import RequestError

# What a template can raise over a message of a shape that it does not expect.
TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
# A role is matched by templates and may be part of a control token that they build (Phi-3's <|user|>).
PLAIN_ROLE = re.compile(r"[A-Za-z0-9_]+")
# Noncharacters first, then the private planes: whatever the request holds, one code point is free.
GUARDS = (range(0xFDD0, 0xFDF0), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks training targets; for serving it is its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own shape

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The statements between the tags, as if the tags were not there."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`tojson` as transformers has it: jinja's own escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    """What templates call to refuse a conversation."""
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    """Local time, for templates that state the date."""
    return datetime.now().strftime(form)


@lru_cache(maxsize=16)
def compile_template(source: str) -> jinja2.Template:
    """The compiled template; rendering it is thread-safe."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment.from_string(source)


@dataclass(frozen=True)
class Control:
    """A special token as tokenizer.json describes it."""

    id: int
    text: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False

    @property
    def pattern(self) -> str:
        """The text it takes up, with the blanks that it swallows."""
        word = re.escape(self.text)
        if self.single_word:
            word = rf"(?<!\w){word}(?!\w)"
        return (r"\s*" if self.lstrip else "") + f"({word})" + (r"\s*" if self.rstrip else "")


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt: text in which the guard still stands between user text and control tokens."""

    text: str
    guard: str

    def unguarded(self, text: str) -> str:
        """`text` without the guard, also where `tojson` has escaped it."""
        return text.replace(self.guard, "").replace(json.dumps(self.guard)[1:-1], "")


class ControlTokens:
    """The special tokens of one tokenizer: how user text is kept from forming one, and how prompts are cut at them."""

    def __init__(self, controls: Collection[Control]) -> None:
        ordered = sorted(
            filter(lambda control: control.text, controls), key=lambda control: (-len(control.text), control.id)
        )
        self._ids = {control.text: control.id for control in ordered}
        self._cut = re.compile("|".join(control.pattern for control in ordered)) if ordered else None
        texts = [text for text in self._ids if len(text) > 1]
        self._whole = re.compile("|".join(re.escape(text) for text in texts)) if texts else None
        self._heads = {text[:n] for text in texts for n in range(1, len(text))}
        self._tails = {text[n:] for text in texts for n in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)

    def guarded(self, text: str, guard: str) -> str:
        """`text`, unable to be or to become a control token wherever a template puts it."""
        core = text.strip()
        if not core or self._whole is None:
            return text
        lead, trail = text[: text.index(core)], text[text.index(core) + len(core) :]
        before = guard if any(core[:n] in self._tails for n in range(1, self._longest)) else ""
        after = guard if any(core[-n:] in self._heads for n in range(1, self._longest)) else ""
        inside = self._whole.sub(lambda match: match[0][0] + guard + match[0][1:], core)
        return f"{lead}{before}{inside}{after}{trail}"

    def pieces(self, prompt: Prompt) -> Iterator[int | tuple[int, str]]:
        """The prompt in order: ids of control tokens, and (offset, text) of what stands between them."""
        start = 0
        for match in self._cut.finditer(prompt.text) if self._cut else ():
            if match.start() > start:
                yield start, prompt.unguarded(prompt.text[start : match.start()])
            yield self._ids[next(group for group in match.groups() if group)]
            start = match.end()
        if start < len(prompt.text):
            yield start, prompt.unguarded(prompt.text[start:])


def strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from chain.from_iterable(chain(strings(key), strings(item)) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(strings, value))


def free_guard(texts: Iterable[str]) -> str:
    """A character that occurs in none of `texts`, neither raw nor escaped."""
    held = [text for text in texts if not text.isascii() or "\\u" in text]
    return next(
        guard
        for guard in map(chr, chain(*GUARDS))
        if not any(guard in text or json.dumps(guard)[1:-1] in text for text in held)
    )


def guard_value(value: Any, controls: ControlTokens, guard: str) -> Any:
    """A JSON value whose strings are all guarded, keys too (`tojson` prints them)."""
    if isinstance(value, str):
        return controls.guarded(value, guard)
    if isinstance(value, dict):
        return {
            guard_value(key, controls, guard): item
            if key == "role" and isinstance(item, str) and PLAIN_ROLE.fullmatch(item)
            else guard_value(item, controls, guard)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [guard_value(item, controls, guard) for item in value]
    return value


def joined_text(content: Any) -> Any:
    """Content as one string: text parts are joined as they stand, since most templates know only strings."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError("only text parts are supported in message content", param="messages")
    return "".join(part["text"] for part in content)


def plain_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: without keys that are null, content as one string."""
    present = {key: value for key, value in message.items() if value is not None}
    return present | {"content": joined_text(present["content"])} if "content" in present else present


def render(source: str, controls: ControlTokens, fixed: dict[str, Any], variables: dict[str, Any]) -> Prompt:
    """The prompt for `variables` (the request's, guarded) and `fixed` (the model's own, trusted, not to be overridden).

    Raises RequestError with param "messages" for whatever the template does not take.
    """
    try:
        guard = free_guard(strings(variables))
        text = compile_template(source).render(guard_value(variables, controls, guard) | fixed)
    except TEMPLATE_FAULTS as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise RequestError(
            f"the chat template refuses these messages: {reason}", code="chat_template_error", param="messages"
        ) from None
    return Prompt(text, guard)
