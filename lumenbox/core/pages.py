"""Who owns which page of one KV pool: free, taken by sequences, cached for prefix hits, or in limbo.

The commit rule (DESIGN §2.2) lives here: a page given back, or evicted from the cache, rests in limbo until the frame
that says so is wholly sent, since a death in between must leave the coordinator's mirror pointing at intact bytes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

PageHash = bytes


def chain_hash(parent: PageHash, tokens: Sequence[int]) -> PageHash:
    """Hash of a whole page's tokens and of everything before them; equal hashes mean equal KV within one identity."""
    return hashlib.blake2b(array("I", tokens).tobytes(), key=parent, digest_size=16).digest()


def page_hashes(tokens: Sequence[int], page_size: int, known: list[PageHash] | None = None) -> list[PageHash]:
    """Hash of every whole page of `tokens`; `known` are those of its first pages, computed earlier."""
    hashes = known if known is not None else []
    parent = hashes[-1] if hashes else b""
    for start in range(len(hashes) * page_size, len(tokens) - page_size + 1, page_size):
        parent = chain_hash(parent, tokens[start : start + page_size])
        hashes.append(parent)
    return hashes


class PagePool:
    """Pages of one worker. Each page is in exactly one of: free, limbo, referenced, cached (see `check`)."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free: list[int] = list(range(num_pages - 1, -1, -1))
        self._limbo: list[int] = []
        self._refs: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._hash_of: dict[int, PageHash] = {}
        self._page_of: dict[PageHash, int] = {}
        self.newly_hashed: list[tuple[int, PageHash]] = []
        self.newly_evicted: list[int] = []

    @property
    def num_free(self) -> int:
        """Pages that can be taken now."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that nobody refers to but that a prefix hit could bring back."""
        return len(self._cached)

    @property
    def num_reachable(self) -> int:
        """Pages that are free now or can be within a step: limbo and cache included."""
        return len(self._free) + len(self._limbo) + len(self._cached)

    @property
    def has_news(self) -> bool:
        """Whether a frame must go out before limbo pages can be used again."""
        return bool(self._limbo)

    def take(self, count: int) -> list[int] | None:
        """Take `count` free pages, or none at all."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
        return pages

    def lookup(self, hashes: Iterable[PageHash]) -> list[int]:
        """Pages of the longest cached run of `hashes`; they are not referenced yet."""
        run: list[int] = []
        for page_hash in hashes:
            page = self._page_of.get(page_hash)
            if page is None:
                break
            run.append(page)
        return run

    def is_cached(self, page: int) -> bool:
        """Whether nobody refers to the page and only its hash keeps it."""
        return page in self._cached

    def share(self, pages: Iterable[int]) -> None:
        """Refer to pages found by `lookup`."""
        for page in pages:
            self._cached.pop(page, None)
            self._refs[page] = self._refs.get(page, 0) + 1

    def give_back(self, pages: Iterable[int]) -> None:
        """Drop one reference each; the last one sends a page to the cache if its hash is known, else to limbo."""
        for page in pages:
            left = self._refs[page] - 1
            if left:
                self._refs[page] = left
                continue
            del self._refs[page]
            if page in self._hash_of:
                self._cached[page] = None
            else:
                self._limbo.append(page)

    def seal(self, page: int, page_hash: PageHash) -> None:
        """Remember what a whole page holds. The first page of a hash keeps it; a twin stays anonymous."""
        if page_hash not in self._page_of and page not in self._hash_of:
            self._page_of[page_hash] = page
            self._hash_of[page] = page_hash
            self.newly_hashed.append((page, page_hash))

    def evict_until(self, wanted: int) -> None:
        """Send least recently used cached pages to limbo until `wanted` pages are free or about to be."""
        while self._cached and len(self._free) + len(self._limbo) < wanted:
            page, _ = self._cached.popitem(last=False)
            told = (page, self._hash_of.pop(page))
            del self._page_of[told[1]]
            self._limbo.append(page)
            if told in self.newly_hashed:
                self.newly_hashed.remove(told)  # just restored: no frame has told of it yet
            else:
                self.newly_evicted.append(page)

    def commit(self) -> None:
        """The frame that reports the last step is wholly sent: its limbo pages may be reused."""
        self._free.extend(reversed(self._limbo))
        self._limbo.clear()
        self.newly_hashed = []
        self.newly_evicted = []

    def adopt(self, hashed: Iterable[tuple[int, PageHash]], tables: Iterable[Sequence[int]]) -> None:
        """Take over, on a fresh pool, what a former incarnation left: its prefix cache and its page tables."""
        assert len(self._free) == self.num_pages and not self._hash_of, "adopt needs a fresh pool"
        for page, page_hash in hashed:
            self._hash_of[page] = page_hash
            self._page_of[page_hash] = page
        for table in tables:
            for page in table:
                self._refs[page] = self._refs.get(page, 0) + 1
        self._cached.update((page, None) for page in self._hash_of if page not in self._refs)
        self._free = [p for p in self._free if p not in self._refs and p not in self._cached]

    def check(self) -> None:
        """Assert that every page is in exactly one place."""
        places = [*self._free, *self._limbo, *self._refs, *self._cached]
        assert sorted(places) == list(range(self.num_pages)), "a page is lost or owned twice"
        assert all(count > 0 for count in self._refs.values())
        assert {h: p for p, h in self._hash_of.items()} == self._page_of
        assert all(page in self._hash_of for page in self._cached)
