"""Text and stop strings against a slow reference: for any cut into tokens, whole characters and no part of a stop."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from slow_text import may_be_completed, reference

from lumenbox.core.requests import Sampled
from lumenbox.core.text import Release, TextAssembler

WORDS = ["a", "b", "ab", "aba", "é", "€", "😀", "a€"]
BYTES = "".join(WORDS).encode() + b"\xff\xe2\x80\xf0\x9f\xed\xa0\xc0\xf4\x90"
PIECES = st.lists(
    st.one_of(
        st.binary(max_size=3), st.sampled_from([bytes([b]) for b in BYTES]), st.sampled_from(WORDS).map(str.encode)
    ),
    max_size=14,
)
STOPS = st.lists(st.text("ab€é😀", min_size=1, max_size=4), max_size=4, unique=True).map(tuple)


def releases(pieces: list[bytes], stop: tuple[str, ...] = (), min_tokens: int = 0, include: bool = False) -> list:
    """One release per token, then that of the end unless a stop string came first."""
    return list(_releases(pieces, TextAssembler(stop, include), min_tokens))


def _releases(pieces: list[bytes], assembler: TextAssembler, min_tokens: int) -> Iterator[Release]:
    for number, piece in enumerate(pieces):
        out = assembler.feed(Sampled(number), piece, number + 1 >= min_tokens)
        yield out
        if out.stopped:
            return
    yield assembler.finish()


def text(outs: list[Release]) -> str:
    return "".join(out.text for out in outs)


def ids(outs: list[Release]) -> list[int]:
    return [drawn.token for out in outs for drawn in out.tokens]


@settings(max_examples=400)
@given(PIECES, STOPS, st.integers(0, 6), st.booleans())
@example([b"a", b"b", b"c"], ("ab",), 2, False)
@example([b"\xe2", b"\x82", b"\xac", b"a"], ("€a",), 0, True)
def test_any_cut_into_tokens_gives_the_reference(
    pieces: list[bytes], stop: tuple[str, ...], min_tokens: int, include: bool
) -> None:
    expected = reference(pieces, stop, min_tokens, include)
    outs = releases(pieces, stop, min_tokens, include)
    assert text(outs) == expected.text
    assert ids(outs) == expected.ids
    assert [out.stopped for out in outs].count(True) == (expected.stopped_at is not None)
    if expected.stopped_at is not None:
        assert len(outs) == expected.stopped_at + 1


@settings(max_examples=200)
@given(PIECES, STOPS)
def test_what_is_out_never_has_to_be_taken_back(pieces: list[bytes], stop: tuple[str, ...]) -> None:
    """No prefix of the releases holds a begun stop string that completes, nor a U+FFFD for a character still open."""
    expected = reference(pieces, stop, 0, include_stop=False).text
    outs = releases(pieces, stop)
    for count in range(len(outs)):
        assert expected.startswith(text(outs[:count]))
        begun = b"".join(pieces[:count])
        certain = len(begun.decode("utf-8", "replace")) - may_be_completed(begun)
        assert len(text(outs[:count])) <= certain


@settings(max_examples=200)
@given(PIECES, STOPS)
def test_a_token_comes_with_the_chunk_that_completes_its_text(pieces: list[bytes], stop: tuple[str, ...]) -> None:
    """As soon as its text is out, and not before."""
    outs = releases(pieces, stop)
    for count in range(len(outs)):
        out_so_far = len(text(outs[:count]))
        for number in range(count):
            end = len(b"".join(pieces[: number + 1]).decode("utf-8", "replace"))
            assert (number in ids(outs[:count])) == (end <= out_so_far)


@settings(max_examples=100)
@given(PIECES)
@example([b"\xed", b"\xa0"])
def test_without_stop_strings_nothing_but_open_characters_is_held(pieces: list[bytes]) -> None:
    """Two bytes of a surrogate are no character, but Python's decoder waits for the third before it says so."""
    outs = releases(pieces)
    for count in range(len(outs)):
        begun = b"".join(pieces[:count])
        held = 2 if re.search(rb"\xed[\xa0-\xbf]\Z", begun) else may_be_completed(begun)
        assert len(text(outs[:count])) == len(begun.decode("utf-8", "replace")) - held


# -- by hand -------------------------------------------------------------------------------------------------------


def told(pieces: list[str | bytes], stop: tuple[str, ...], **more: object) -> list[tuple[str, list[int]]]:
    as_bytes = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    return [(out.text, [d.token for d in out.tokens]) for out in releases(as_bytes, stop, **more)]  # type: ignore[arg-type]


def test_a_character_waits_for_its_last_byte() -> None:
    assert told([b"a\xf0", b"\x9f", b"\x98", b"\x80!"], ()) == [
        ("a", []), ("", []), ("", []), ("😀!", [0, 1, 2, 3]), ("", []),
    ]  # fmt: skip


def test_a_torn_character_is_replaced_only_at_the_end() -> None:
    assert told([b"a", b"\xe2\x82"], ()) == [("a", [0]), ("", []), ("\ufffd", [1])]


def test_a_stop_string_over_three_tokens_leaves_no_trace() -> None:
    assert told(["x", "<", "en", "d>y"], ("<end>",)) == [("x", [0]), ("", []), ("", []), ("", [])]


def test_what_only_began_like_a_stop_string_comes_late_but_whole() -> None:
    assert told(["x", "<", "e", "!"], ("<end>",)) == [("x", [0]), ("", []), ("", []), ("<e!", [1, 2, 3]), ("", [])]


def test_the_included_stop_string_comes_with_its_ids() -> None:
    assert told(["x", "<", "d>y"], ("<d>",), include=True) == [("x", [0]), ("", []), ("<d>", [1])]


def test_the_stop_that_is_complete_first_wins_then_the_one_that_began_first() -> None:
    assert told(["abcd"], ("bcd", "bc")) == [("a", [])]
    assert told(["xabc"], ("bc", "abc")) == [("x", [])]


def test_a_stop_string_may_overlap_itself() -> None:
    assert "".join(out for out, _ in told(list("aabaab!"), ("aab!",))) == "aab"


def test_below_min_tokens_a_stop_string_is_text() -> None:
    assert told(["END", "x", "END"], ("END",), min_tokens=3) == [("END", [0]), ("x", [1]), ("", [])]


def test_a_stop_string_that_begins_below_min_tokens_and_ends_above_does_not_leak() -> None:
    assert told(["x", "EN", "D"], ("END",), min_tokens=3) == [("x", [0]), ("", []), ("", [])]


@pytest.mark.parametrize("held", [b"", b"\xe2"])
def test_an_end_token_has_no_text_and_comes_last(held: bytes) -> None:
    assembler = TextAssembler(("ab",))
    assembler.feed(Sampled(1), b"a" + held)
    out = assembler.finish(Sampled(2))
    assert [drawn.token for drawn in out.tokens] == [1, 2]
    assert out.text == "a" + ("\ufffd" if held else "")
