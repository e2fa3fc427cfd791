"""Pages: in one place each, in limbo until their frame is sent, found again by equal prefixes only."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumenbox.core.pages import PagePool, chain_hash, page_hashes

VERBS = ["take", "share", "give", "seal", "evict", "sent"]
TOKENS = st.lists(st.integers(0, 2), max_size=12)


@given(TOKENS, TOKENS, st.integers(1, 4))
def test_page_hashes_are_equal_for_equal_prefixes_only(left: list[int], right: list[int], page_size: int) -> None:
    ours, theirs = page_hashes(left, page_size), page_hashes(right, page_size)
    assert len(ours) == len(left) // page_size
    for index in range(min(len(ours), len(theirs))):
        end = (index + 1) * page_size
        assert (ours[index] == theirs[index]) == (left[:end] == right[:end])


@given(TOKENS, TOKENS, st.integers(1, 4))
def test_page_hashes_go_on_from_those_known(first: list[int], more: list[int], page_size: int) -> None:
    known = page_hashes(first, page_size)
    assert page_hashes(first + more, page_size, known) == page_hashes(first + more, page_size)


def test_take_gives_all_or_nothing() -> None:
    pool = PagePool(3)
    assert pool.take(4) is None
    assert pool.num_free == 3
    assert sorted(pool.take(3) or []) == [0, 1, 2]


def test_a_page_given_back_is_not_taken_before_the_frame_is_sent() -> None:
    pool = PagePool(1)
    pages = pool.take(1)
    assert pages == [0]
    pool.give_back(pages)
    assert pool.has_news
    assert pool.take(1) is None
    pool.commit()
    assert pool.take(1) == [0]


def test_an_evicted_page_is_not_taken_before_the_frame_is_sent() -> None:
    pool = PagePool(1)
    pool.seal(*(pool.take(1) or []), chain_hash(b"", [1]))
    pool.commit()  # the frame that tells of the hash
    pool.give_back([0])
    assert not pool.has_news
    pool.evict_until(1)
    assert (pool.newly_evicted, pool.take(1)) == ([0], None)
    pool.commit()
    assert pool.take(1) == [0]


def test_a_page_hashed_and_evicted_between_two_frames_is_told_as_neither() -> None:
    pool = PagePool(1)
    pool.seal(*(pool.take(1) or []), b"h")
    pool.give_back([0])
    pool.evict_until(1)
    assert (pool.newly_hashed, pool.newly_evicted) == ([], [])


def test_the_first_page_of_a_hash_keeps_it() -> None:
    pool = PagePool(2)
    first, twin = pool.take(2) or []
    pool.seal(first, b"h")
    pool.seal(twin, b"h")
    assert pool.lookup([b"h"]) == [first]
    pool.give_back([first, twin])
    assert (pool.num_cached, pool.has_news) == (1, True)


def test_the_least_recently_used_cached_page_is_evicted_first() -> None:
    pool = PagePool(3)
    for page in pool.take(3) or []:
        pool.seal(page, bytes([page]))
    pool.commit()
    pool.give_back([2, 0, 1])
    pool.share([2])
    pool.give_back([2])
    pool.evict_until(2)
    assert pool.newly_evicted == [0, 1]
    assert pool.is_cached(2)


def test_lookup_stops_at_the_first_gap() -> None:
    pool = PagePool(2)
    first, third = pool.take(2) or []
    pool.seal(first, b"1")
    pool.seal(third, b"3")
    assert pool.lookup([b"1", b"2", b"3"]) == [first]


def test_a_pool_adopts_only_when_fresh() -> None:
    pool = PagePool(2)
    pool.take(1)
    with pytest.raises(AssertionError, match="fresh"):
        pool.adopt([], [])


@settings(max_examples=200)
@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 7)), max_size=60),
)
def test_every_page_is_in_one_place_after_any_history(num_pages: int, history: list[tuple[str, int]]) -> None:
    """A page that was given back or evicted rests until `sent`; a page with references is never handed out."""
    pool = PagePool(num_pages)
    held: list[int] = []
    resting: set[int] = set()
    for verb, number in history:
        before = set(pool._limbo)
        match verb:
            case "take":
                pages = pool.take(number)
                assert (pages is None) == (number > num_pages - len({*held, *resting, *pool._cached}))
                assert not {*held, *resting} & set(pages or [])
                held += pages or []
            case "share":
                pages = pool.lookup([bytes([number])])
                pool.share(pages)
                held += pages
            case "give" if held:
                pool.give_back([held.pop(number % len(held))])
            case "seal" if held:
                pool.seal(held[number % len(held)], bytes([number]))
            case "evict":
                pool.evict_until(number)
            case "sent":
                pool.commit()
        resting = set() if verb == "sent" else resting | (set(pool._limbo) - before)
        assert resting == set(pool._limbo)
        pool.check()
        assert sorted(held) == sorted(page for page, count in pool._refs.items() for _ in range(count))
        assert pool.num_reachable == num_pages - len(set(held))
