"""What a client must see, computed the slow and obvious way: from all tokens at once, character by character."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """`ids` are the positions of the tokens that the client is sent; `stopped_at` the token that completed a stop."""

    text: str
    ids: list[int]
    stopped_at: int | None


def ends_of_pieces(pieces: list[bytes]) -> list[int]:
    """Characters that must be out before token i counts as released; a character that it begins counts too."""
    ends = []
    for count in range(1, len(pieces) + 1):
        begun = b"".join(pieces[:count])
        ends.append(len(begun.decode("utf-8", "replace")))
    return ends


def reference(pieces: list[bytes], stop: tuple[str, ...], min_tokens: int, include_stop: bool) -> Answer:
    """Decode everything, find the first stop string that is complete at or after token `min_tokens`, cut there."""
    text = b"".join(pieces).decode("utf-8", "replace")
    ends = ends_of_pieces(pieces)
    for end in range(1, len(text) + 1):
        token = next(i for i, piece_end in enumerate(ends) if whole_characters(pieces, i) >= end)
        matches = [string for string in stop if text[:end].endswith(string)]
        if matches and token + 1 >= min_tokens:
            longest = max(map(len, matches))
            cut = end if include_stop else end - longest
            return Answer(text[:cut], [i for i in range(token + 1) if ends[i] <= cut], token)
    return Answer(text, list(range(len(pieces))), None)


def whole_characters(pieces: list[bytes], last: int) -> int:
    """Characters that are certain once token `last` is there: all but one that later bytes may complete."""
    if last == len(pieces) - 1:
        return len(b"".join(pieces).decode("utf-8", "replace"))
    begun = b"".join(pieces[: last + 1])
    return len(begun.decode("utf-8", "replace")) - may_be_completed(begun)


def may_be_completed(begun: bytes) -> bool:
    """Whether the last bytes are the beginning of a character: some tail of up to 3 bytes that some bytes complete."""
    return any(completes(begun[-length:]) for length in range(1, min(3, len(begun)) + 1))


def completes(tail: bytes) -> bool:
    extra = {0: 0, 2: 1, 3: 2, 4: 3}[lead_length(tail[0])] + 1 - len(tail)
    if extra <= 0:
        return False
    return any(is_one_character(tail + bytes([first]) + b"\x80" * (extra - 1)) for first in range(0x80, 0xC0))


def lead_length(byte: int) -> int:
    return 2 if 0xC2 <= byte <= 0xDF else 3 if 0xE0 <= byte <= 0xEF else 4 if 0xF0 <= byte <= 0xF4 else 0


def is_one_character(data: bytes) -> bool:
    try:
        return len(data.decode("utf-8")) == 1
    except UnicodeDecodeError:
        return False
