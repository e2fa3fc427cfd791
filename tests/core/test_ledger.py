"""The ledger: what frames bring, once each, in order, and of the right epoch only."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_text import reference

from lumenbox.core.ledger import Gain, Ledger
from lumenbox.core.requests import Sampled, SamplingParams

VOCABULARY = [b"a", b"b", b"ab", "é".encode(), b"\xe2", b"\x82", b"\xac", b"\xff", "😀".encode(), b"ba"]
EOS = 10  # its bytes are empty: a special token
TOKEN_BYTES = [*VOCABULARY, b""]


def ledger(stop: tuple[str, ...] = (), include_stop: bool = False, min_tokens: int = 0) -> Ledger:
    """With one open request, number 7."""
    book = Ledger(TOKEN_BYTES)
    book.open(7, SamplingParams(max_tokens=99, min_tokens=min_tokens), [1, 2, 3], stop, include_stop)
    return book


def drawn(*tokens: int) -> list[Sampled]:
    return [Sampled(token) for token in tokens]


def gained(gain: Gain | None) -> tuple[str, list[int], str | None]:
    assert gain is not None
    return gain.text, [sampled.token for sampled in gain.tokens], gain.finish_reason


@settings(max_examples=300)
@given(
    st.lists(st.lists(st.integers(0, len(VOCABULARY) - 1), min_size=1, max_size=3), max_size=8),
    st.lists(st.text("abé", min_size=1, max_size=3), max_size=3).map(tuple),
    st.integers(0, 5),
    st.booleans(),
    st.sampled_from(["length", "stop"]),
)
def test_frames_of_any_length_add_up_to_the_reference(
    groups: list[list[int]], stop: tuple[str, ...], min_tokens: int, include_stop: bool, reason: str
) -> None:
    """The last frame carries the worker's own end; an end token brings its id and no text."""
    tokens = [token for group in groups for token in group] + ([EOS] if reason == "stop" else [])
    expected = reference([TOKEN_BYTES[token] for token in tokens], stop, min_tokens, include_stop)
    groups = [*groups, [EOS]] if reason == "stop" else groups or [[]]
    book = ledger(stop, include_stop, min_tokens)
    gains = [book.extend(7, 0, drawn(*g), reason if n == len(groups) - 1 else None) for n, g in enumerate(groups)]
    told = [gain for gain in gains if gain is not None]
    assert "".join(gain.text for gain in told) == expected.text
    assert [d.token for gain in told for d in gain.tokens] == [tokens[i] for i in expected.ids]
    assert [gain.finish_reason for gain in told][:-1] == [None] * (len(told) - 1)
    assert told[-1].finish_reason == ("stop" if expected.stopped_at is not None else reason)
    used = len(tokens) if expected.stopped_at is None else expected.stopped_at + 1
    assert book.entries[7].num_generated == book.generated_tokens == used


def test_tokens_of_another_epoch_are_dropped_whoever_sends_them() -> None:
    book = ledger()
    book.entries[7].epoch = 1
    assert book.extend(7, 0, drawn(0), None) is None
    assert book.extend(7, 2, drawn(0), "length") is None
    assert gained(book.extend(7, 1, drawn(1), None)) == ("b", [1], None)
    assert book.entries[7].tokens == [1, 2, 3, 1]


def test_nothing_follows_an_end() -> None:
    book = ledger()
    assert gained(book.extend(7, 0, drawn(0), "length")) == ("a", [0], "length")
    assert book.extend(7, 0, drawn(1), None) is None
    assert book.extend(7, 0, drawn(1), "length") is None
    assert book.generated_tokens == 1


def test_nothing_follows_a_stop_string_not_even_in_the_same_frame() -> None:
    """The ids of the stop string count in usage and are not sent; the worker is still to be told."""
    book = ledger(stop=("ba",))
    gain = book.extend(7, 0, drawn(0, 1, 0, 3, 3), None)
    assert gained(gain) == ("a", [0], "stop")
    assert gain is not None
    assert gain.stopped
    assert book.entries[7].num_generated == 3
    assert book.extend(7, 0, drawn(3), "length") is None


def test_an_end_of_the_workers_own_is_no_stop_to_tell_it() -> None:
    gain = ledger().extend(7, 0, drawn(0, EOS), "stop")
    assert gained(gain) == ("a", [0, EOS], "stop")
    assert gain is not None
    assert not gain.stopped


def test_the_text_of_a_stop_token_is_left_out_unless_asked_for() -> None:
    assert gained(ledger().extend(7, 0, drawn(0, 1), "stop")) == ("a", [0, 1], "stop")
    assert gained(ledger(include_stop=True).extend(7, 0, drawn(0, 1), "stop")) == ("ab", [0, 1], "stop")


def test_a_token_outside_the_vocabulary_has_no_text() -> None:
    """A model's output layer may be wider than its tokenizer."""
    assert gained(ledger().extend(7, 0, drawn(99), None)) == ("", [99], None)


@pytest.mark.parametrize("rid", [7, 8])
def test_a_closed_or_unknown_request_gains_nothing(rid: int) -> None:
    book = ledger()
    book.close(rid)
    book.close(rid)
    assert book.extend(rid, 0, drawn(0), None) is None or rid == 8


def test_a_recovery_in_mid_character_and_mid_stop_string_goes_on_as_if_nothing_had_been() -> None:
    """The text state is the coordinator's: the new epoch's tokens join those of the old one."""
    book = ledger(stop=("€b",))
    assert gained(book.extend(7, 0, drawn(4, 5), None)) == ("", [], None)
    book.entries[7].epoch = 1
    assert book.extend(7, 0, drawn(6), None) is None
    assert gained(book.extend(7, 1, drawn(6), None)) == ("", [], None)
    assert gained(book.extend(7, 1, drawn(1), None)) == ("", [], "stop")
