"""Text to token ids and back, without transformers: `tokenizers` and a sandboxed jinja2.

One object per model, read-only after load, so threads may share it. Special tokens enter a prompt in two ways only:
the tokenizer's own post-processor (BOS) and the chat template; the same characters in a user's text are plain text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import tokenizers

from lumenbox.errors import ModelError, RequestError
from lumenbox.models import vocabulary
from lumenbox.models.chat import Control, ControlTokens, plain_message, render
from lumenbox.models.folder import read_json, read_optional_json, require_folder, whole_number

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


class Tokenizer:
    """A model's tokenizer, chat template and end tokens.

    `token_bytes[id]` are the exact bytes that a token adds to the text (b"" for special tokens), for all ids of the
    model's embedding (`vocab_size`) and of the tokenizer. `eos_ids` is the union of what generation_config.json,
    config.json and tokenizer_config.json name. `generation_defaults` are the sampling settings of
    generation_config.json, for `--generation-config model`.
    """

    def __init__(
        self,
        engine: tokenizers.Tokenizer,
        *,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        named_tokens: dict[str, str],
        chat_template: str | None,
        generation_defaults: dict[str, float],
    ) -> None:
        engine.no_truncation()
        engine.no_padding()
        engine.encode_special_tokens = True
        added = engine.get_added_tokens_decoder()
        special = {token_id: token for token_id, token in added.items() if token.special}
        vocab = engine.get_vocab(with_added_tokens=True)
        size = max(vocab_size, max(vocab.values(), default=-1) + 1)
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self.special_ids = frozenset(special)
        self.chat_template = chat_template
        self.generation_defaults = generation_defaults
        self.token_bytes = vocabulary.token_bytes(vocab, self.special_ids, decoder_state(engine), size)
        self._engine = engine
        self._named_tokens = named_tokens
        self._controls = ControlTokens([control_of(token_id, token) for token_id, token in special.items()])

    @classmethod
    def load(cls, model_dir: Path) -> Self:
        """Read the tokenizer of a model folder. Raises ModelError that names the file at fault."""
        require_folder(model_dir)
        config = read_json(model_dir, "config.json")
        engine = read_tokenizer(model_dir)
        generation = read_optional_json(model_dir, "generation_config.json")
        settings = read_optional_json(model_dir, "tokenizer_config.json")
        named = named_tokens(read_optional_json(model_dir, "special_tokens_map.json") | settings)
        eos = [engine.token_to_id(named["eos_token"])] if "eos_token" in named else []
        return cls(
            engine,
            vocab_size=whole_number(config, "vocab_size", model_dir),
            eos_ids=union_of_ids(generation.get("eos_token_id"), config.get("eos_token_id"), eos),
            named_tokens=named,
            chat_template=find_template(model_dir, settings),
            generation_defaults={key: generation[key] for key in SAMPLING_DEFAULTS if generation.get(key) is not None},
        )

    def encode(self, text: str) -> list[int]:
        """A plain prompt's ids, with BOS exactly when the model's tokenizer puts one."""
        return self._encode(self._engine, text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[dict[str, Any]], /, **kwargs: Any) -> list[int]:
        """A conversation's ids by the model's chat template, ready for the assistant's turn.

        `kwargs` (tools, documents, chat_template_kwargs) reach the template. Raises RequestError, param "messages".
        """
        if self.chat_template is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions", code="chat_template_missing", param="messages"
            )
        variables = {"tools": None, "documents": None, "add_generation_prompt": True} | kwargs
        variables["messages"] = [plain_message(message) for message in messages]
        prompt = render(self.chat_template, self._controls, self._named_tokens, variables)
        ids: list[int] = []
        for piece in self._controls.pieces(prompt):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                offset, text = piece
                ids += self._encode(self._inner if offset else self._engine, text, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text that `ids` add, special tokens left out. Raises RequestError for an id outside the vocabulary."""
        table = self.token_bytes
        for token_id in ids:
            if not 0 <= token_id < len(table):
                raise RequestError(f"token id {token_id} is outside the vocabulary of {len(table)}", param="tokens")
        return b"".join(map(table.__getitem__, ids)).decode("utf-8", errors="replace")

    def _encode(self, engine: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            ids: list[int] = engine.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:  # what `tokenizers` says of a str that is not valid UTF-8
            raise RequestError("the text holds an unpaired surrogate", code="invalid_unicode") from None
        return ids

    @cached_property
    def _inner(self) -> tokenizers.Tokenizer:
        """The tokenizer for text that is not the prompt's first: sentencepiece's "first" blank must not come again."""
        state = json.loads(self._engine.to_str()) if '"prepend_scheme":"first"' in self._engine.to_str() else None
        if state is None:
            return self._engine
        for step in state["pre_tokenizer"].get("pretokenizers", [state["pre_tokenizer"]]):
            if step.get("prepend_scheme") == "first":
                step["prepend_scheme"] = "never"
        inner: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(json.dumps(state))
        inner.encode_special_tokens = True
        return inner


def read_tokenizer(model_dir: Path) -> tokenizers.Tokenizer:
    """Parse tokenizer.json; slow (sentencepiece, tiktoken) vocabularies without one are refused by name."""
    path = model_dir / "tokenizer.json"
    try:
        return tokenizers.Tokenizer.from_buffer(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"tokenizer.json is missing in the model folder {model_dir}") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path} is no tokenizer: {str(error).splitlines()[0]}") from None


def decoder_state(engine: tokenizers.Tokenizer) -> bytes:
    """The `decoder` entry of tokenizer.json as JSON."""
    if engine.decoder is None:
        raise ModelError("tokenizer.json has no decoder")
    state: bytes = engine.decoder.__getstate__()
    return state


def control_of(token_id: int, token: tokenizers.AddedToken) -> Control:
    """A special token in our own words."""
    return Control(token_id, token.content, token.lstrip, token.rstrip, token.single_word)


def named_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and their like, which templates print by name; a token is a string or {"content": …}."""
    found: dict[str, str] = {}
    for name in NAMED_TOKENS:
        match settings.get(name):
            case str(text) | {"content": str(text)}:
                found[name] = text
    return found


def union_of_ids(*sources: int | list[int | None] | None) -> tuple[int, ...]:
    """Every id named by any source, in ascending order."""
    lists = [source if isinstance(source, list) else [source] for source in sources]
    return tuple(sorted({token_id for ids in lists for token_id in ids if token_id is not None}))


def find_template(model_dir: Path, settings: dict[str, Any]) -> str | None:
    """The chat template from wherever this generation of the format keeps it; of several named ones, `default`."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = read_optional_json(model_dir, "chat_template.json").get("chat_template", settings.get("chat_template"))
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None
