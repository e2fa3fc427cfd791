"""`tiny-random`: a Llama folder made from a seed, for tests and rehearsals. No network, 1 MB, the same everywhere.

It must be cruel to a serving engine: its weights are wide, so a lost, stale or foreign KV page changes the text within
a few tokens. And it must be kind to a test: it never ends by itself, never draws a control token, and its output is
printable and always valid UTF-8, in characters of one to four bytes of which some come in two or three tokens.

How that is guaranteed rather than hoped for: the first `FLAGS` coordinates of the residual stream are written by the
embedding alone (the rows of o_proj and down_proj that would write there are zero), so they reach lm_head unchanged
but for RMSNorm's positive factor. Coordinate `BIAS` is the same for all tokens, which gives lm_head the bias that
Llama has not; `OPENS_1` and `OPENS_2` are set by tokens that end inside a character and lift exactly the tokens that
may go on from there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lumenbox.models.vocabulary import byte_alphabet

Array = npt.NDArray[np.float32]

LAYERS = 4
HIDDEN = 64
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
INTERMEDIATE = 160
CONTEXT = 8192
VOCAB = 512
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '')"
    " + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Texts that are one token each, in merge order: an entry's own beginnings come before it or are made on the way.
WORDS = (  # noqa: SIM905 - words read best as words
    "the of and in to is for that on with as it was by at from be this are or an not which one all we can has but"
    " more time will page stream room open river stone table green letter window water house number"
).split()
ENDINGS = "ing er ed ly tion es al ment ness able ous ive th st nd ch sh ck ou ea ee oo ai".split()  # noqa: SIM905
CHARACTERS = (
    "é à ü ñ ö ß ø å ж я Ω 日 本 語 中 文 字 水 火 木 金 の は を ん ア 한 글 € → ∑ ∞ ≤ ✓ ★ 😀 🚀 🎉 🌍 👍 🐍 𝒜".split()  # noqa: SIM905
)
# Beginnings of a character that are drawn as tokens of their own, by what must follow them.
OPEN_1 = (b"\xc3", b"\xe6\x97", b"\xf0\x9f\x98")  # one more byte of LAST_BYTES: Latin-1 letters, 日's row, faces
OPEN_2 = (b"\xf0\x9f",)  # MIDDLE_BYTE, then one of LAST_BYTES
MIDDLE_BYTE = b"\x98"
LAST_BYTES = tuple(bytes([byte]) for byte in range(0xA0, 0xC0))

BIAS, OPENS_1, OPENS_2, FLAGS = 0, 1, 2, 3
BIAS_LEVEL = 4.0
OPEN_LEVEL = 4.0
BAN = 250.0


def make(model_dir: Path, seed: int) -> str:
    """Write the model folder into the existing `model_dir`; returns the digest of what it means."""
    from safetensors.numpy import save

    vocabulary, merges = make_vocabulary()
    tensors = make_weights(seed, vocabulary)
    files = {
        name: json.dumps(value, ensure_ascii=False, indent=1) + "\n"
        for name, value in folder_files(vocabulary, merges).items()
    }
    (model_dir / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    for name, text in files.items():
        (model_dir / name).write_text(text, encoding="utf-8")
    return digest(tensors, files)


def digest(tensors: dict[str, Array], files: dict[str, str]) -> str:
    """sha256 over the JSON files and the tensors' names, shapes and values.

    Not over the weight file: its header is the safetensors library's to lay out.
    """
    sha = hashlib.sha256()
    for name in sorted(files):
        sha.update(f"{name}\n{files[name]}".encode())
    for name in sorted(tensors):
        sha.update(f"{name} {tensors[name].shape}\n".encode())
        sha.update(tensors[name].astype("<f4").tobytes())
    return sha.hexdigest()


# --- the vocabulary ------------------------------------------------------------------------------------------------


def make_vocabulary() -> tuple[dict[bytes, int], list[tuple[bytes, bytes]]]:
    """Token → id, and the merges that make the longer ones. Byte tokens have their value as id."""
    vocabulary = {bytes([byte]): byte for byte in range(256)}
    merges: list[tuple[bytes, bytes]] = []
    for text in (*OPEN_2, *OPEN_1, *(word.encode() for word in token_texts())):
        add_token(text, vocabulary, merges)
    assert len(vocabulary) + len(SPECIAL) <= VOCAB, len(vocabulary)
    return vocabulary, merges


def token_texts() -> list[str]:
    """The longer tokens, in merge order; words carry their blank, as in any byte-level vocabulary."""
    return [*CHARACTERS, *ENDINGS, *(f" {word}" for word in WORDS)]


def add_token(text: bytes, vocabulary: dict[bytes, int], merges: list[tuple[bytes, bytes]]) -> None:
    """Merge `text` into one token, pair by pair from the left, adding what is made on the way."""
    parts = split(text, merges)
    while len(parts) > 1:
        merges.append((parts[0], parts[1]))
        parts[:2] = [parts[0] + parts[1]]
        vocabulary[parts[0]] = len(vocabulary)


def split(text: bytes, merges: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
    """What BPE makes of `text` so far: each merge applied wherever it fits, in order."""
    parts = [bytes([byte]) for byte in text]
    for left, right in merges:
        at = 0
        while at < len(parts) - 1:
            if (parts[at], parts[at + 1]) == (left, right):
                parts[at : at + 2] = [left + right]
            at += 1
    return parts


def printable(token: bytes) -> bool:
    """Whole characters only, all of them visible (or a blank)."""
    try:
        return token.decode().isprintable()
    except UnicodeDecodeError:
        return False


def special_ids(vocabulary: dict[bytes, int]) -> dict[str, int]:
    """Special tokens come after all others."""
    return {text: len(vocabulary) + i for i, text in enumerate(SPECIAL)}


# --- the weights ---------------------------------------------------------------------------------------------------


class Draws:
    """Bell-shaped numbers from PCG64's raw words and exact arithmetic, so the same on every machine and numpy."""

    def __init__(self, seed: int) -> None:
        self._source = np.random.PCG64(seed)

    def __call__(self, *shape: int, std: float) -> Array:
        """A tensor of standard deviation `std`: the sum of the four 16-bit quarters of a word, centred."""
        count = int(np.prod(shape))
        raw = np.asarray(self._source.random_raw(count), dtype="<u8")
        quarters = raw.view("<u2").reshape(count, 4).astype(np.int64)
        centred = quarters.sum(axis=1) * 2 - 4 * 65535  # an integer of standard deviation 4 / sqrt(12) * 65536
        scaled: Array = (centred.astype(np.float64) * (std / 75674.0)).astype(np.float32)
        return scaled.reshape(shape)


def make_weights(seed: int, vocabulary: dict[bytes, int]) -> dict[str, Array]:
    """All tensors of the model by their names in transformers."""
    draw = Draws(seed)
    ones = np.ones(HIDDEN, np.float32)
    tensors = {"model.embed_tokens.weight": make_embedding(draw, vocabulary), "model.norm.weight": ones.copy()}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }
        tensors |= {f"{prefix}{name}.weight": draw(*shape, std=0.3) for name, shape in shapes.items()}
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"{prefix}{name}.weight"][:FLAGS] = 0
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = ones.copy()
    tensors["lm_head.weight"] = make_head(draw, vocabulary)
    return tensors


def make_embedding(draw: Draws, vocabulary: dict[bytes, int]) -> Array:
    """Wide rows; the flags say what may follow the token."""
    embedding = draw(VOCAB, HIDDEN, std=1.0)
    embedding[:, :FLAGS] = 0
    embedding[:, BIAS] = BIAS_LEVEL
    embedding[[vocabulary[token] for token in (*OPEN_1, MIDDLE_BYTE)], OPENS_1] = OPEN_LEVEL
    embedding[[vocabulary[token] for token in OPEN_2], OPENS_2] = OPEN_LEVEL
    return embedding


def make_head(draw: Draws, vocabulary: dict[bytes, int]) -> Array:
    """Rows of the drawn tokens, and a ban on all others that only the flags lift."""
    head = draw(VOCAB, HIDDEN, std=0.3)
    drawn = [vocabulary[token] for token in vocabulary if printable(token) or token in (*OPEN_1, *OPEN_2)]
    last = [vocabulary[token] for token in LAST_BYTES]
    middle = vocabulary[MIDDLE_BYTE]
    head[:, :FLAGS] = 0
    head[:, BIAS] = -BAN
    head[drawn, BIAS] = 0
    head[last, OPENS_1] = 2 * BAN * BIAS_LEVEL / OPEN_LEVEL
    head[middle, OPENS_2] = 2 * BAN * BIAS_LEVEL / OPEN_LEVEL
    return head


# --- the files -----------------------------------------------------------------------------------------------------


def folder_files(vocabulary: dict[bytes, int], merges: list[tuple[bytes, bytes]]) -> dict[str, dict[str, Any]]:
    """The JSON files of the folder."""
    special = special_ids(vocabulary)
    end_of_text, _, end_of_turn = SPECIAL
    return {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "num_hidden_layers": LAYERS,
            "hidden_size": HIDDEN,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "intermediate_size": INTERMEDIATE,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "max_position_embeddings": CONTEXT,
            "vocab_size": VOCAB,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": None,
            "eos_token_id": special[end_of_turn],
        },
        "generation_config.json": {"eos_token_id": [special[end_of_turn], special[end_of_text]]},
        "tokenizer.json": tokenizer_file(vocabulary, merges, special),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": end_of_turn,
            "pad_token": end_of_text,
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }


def tokenizer_file(
    vocabulary: dict[bytes, int], merges: list[tuple[bytes, bytes]], special: dict[str, int]
) -> dict[str, Any]:
    """tokenizer.json: byte-level BPE as GPT-2 has it."""
    alphabet = {byte: char for char, byte in byte_alphabet().items()}

    def written(token: bytes) -> str:
        return "".join(alphabet[byte] for byte in token)

    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token_id, "content": text} | flags for text, token_id in special.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {written(token): token_id for token, token_id in vocabulary.items()},
            "merges": [[written(left), written(right)] for left, right in merges],
        },
    }
