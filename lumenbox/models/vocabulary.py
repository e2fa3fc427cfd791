"""Token id → the exact bytes that the token adds to the text.

The ledger streams from this table alone: it never sees a tokenizer. What a tokenizer's decoder does to a whole
sequence is therefore reduced here to a function of one token. The one thing that cannot be (sentencepiece drops the
first blank of a text) is left out on purpose: a stream continues a prompt, so that blank is real.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from lumenbox.errors import ModelError

ToBytes = Callable[[str], bytes]

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Decoder steps that do nothing which shows in one token's bytes.
NO_EFFECT = frozenset({"Fuse", "Strip"})


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte → the byte."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(kept)]
    return {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(moved)}


def bytes_of_byte_level() -> ToBytes:
    """Tokens written in the byte alphabet; one with a foreign character (an added token) stands for itself."""
    table = dict.fromkeys(range(0x180), "\uffff") | {ord(char): chr(byte) for char, byte in byte_alphabet().items()}

    def convert(token: str) -> bytes:
        try:
            return token.translate(table).encode("latin-1")
        except UnicodeEncodeError:
            return token.encode()

    return convert


def bytes_of_pieces(replacements: list[tuple[str, str]], byte_fallback: bool) -> ToBytes:
    """Sentencepiece pieces: plain text with a mark for blanks, and <0xNN> for a single byte."""

    def convert(token: str) -> bytes:
        if byte_fallback and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return convert


def token_to_bytes(decoder: dict[str, Any]) -> ToBytes:
    """The function that tokenizer.json's `decoder` amounts to for one token."""
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    if any(step.get("type") == "ByteLevel" for step in steps):
        return bytes_of_byte_level()
    replacements: list[tuple[str, str]] = []
    byte_fallback = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": mark}:
                replacements.append((mark, " "))
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": kind} if kind in NO_EFFECT:
                pass
            case _:
                raise ModelError(f"tokenizer.json has a decoder that lumenbox does not know: {step.get('type')}")
    return bytes_of_pieces(replacements, byte_fallback)


def token_bytes(vocab: Mapping[str, int], skipped: Collection[int], decoder: bytes, size: int) -> list[bytes]:
    """The table for `size` ids. Skipped (special) ids and ids without a token add nothing."""
    convert = token_to_bytes(json.loads(decoder))
    table = [b""] * size
    for token, token_id in vocab.items():
        if token_id not in skipped:
            table[token_id] = convert(token)
    return table
