"""A cache group and its pages: free list, reference counts, published pages in order of last use.

A page is in exactly one of three states: referenced (count > 0), evictable (published, count 0) or
free (unpublished, count 0). Page 0 is the null page: it fills unused table entries and is never
allocated. Eviction happens only inside `allocate`. A page of the modules is published with its
depth: so many of them, from the first on, have entries there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mmtp_jax.cache.keys import PageKey
from mmtp_jax.config import require

NULL_PAGE = 0


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share a page pool.

    `window` counts the positions a query reads, itself included (or convolution taps); None: all.
    `num_pages` includes the null page.
    """

    name: str
    owner: Literal["target", "modules"]
    window: int | None
    num_pages: int
    page_size: int

    def __post_init__(self) -> None:
        require(self.page_size >= 1, f"page_size must be >= 1, got {self.page_size}")
        require(
            self.window is None or self.window >= 1, f"window must be >= 1 or None: {self.window}"
        )

    def first_page_read(self, position: int) -> int:
        """The index of the first page that queries at `position` and later read."""
        if self.window is None:
            return 0
        return max(0, position - (self.window - 1)) // self.page_size

    def reach(self, behind: int) -> int | None:
        """How far below the computed positions rows still read (None: everywhere), if modules may
        run over the last `behind` positions again."""
        if self.window is None:
            return None
        return self.window - 1 + (behind if self.owner == "modules" else 0)

    def pages_for_one_request(self, behind: int, max_model_len: int, max_rows: int) -> int:
        """Pages, the null page aside, that a lone request needs with `max_rows` rows a step.

        A windowed group holds the positions below `computed` that are still read, two steps (one is
        in flight), the page that these straddle and the source of a copy.
        """
        everything = -(-max_model_len // self.page_size)
        reach = self.reach(behind)
        if reach is None:
            return everything
        return min(everything, -(-(reach + 2 * max_rows) // self.page_size) + 2)


class PagePool:
    """Reference-counted pages 1..num_pages-1 and the keys of the published ones."""

    def __init__(self, num_pages: int) -> None:
        require(num_pages >= 2, f"num_pages must be >= 2 (page 0 is the null page): {num_pages}")
        self.num_pages = num_pages
        self._references = [0] * num_pages
        self._keys: list[PageKey | None] = [None] * num_pages
        self._depths = [0] * num_pages
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._published: dict[bytes, dict[tuple[int, ...], int]] = {}

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can still hand out, evictable ones included."""
        return len(self._free) + len(self._evictable)

    @property
    def num_referenced(self) -> int:
        return self.num_pages - 1 - self.num_free

    def references(self, page: int) -> int:
        return self._references[page]

    def key(self, page: int) -> PageKey | None:
        """The key a page is published under, or None."""
        return self._keys[page]

    def allocate(self) -> int:
        """A page with one reference and undefined contents; RuntimeError when `num_free` is 0."""
        if self._free:
            page = self._free.pop()
        elif self._evictable:
            page, _ = self._evictable.popitem(last=False)
            self._unpublish(page)
        else:
            raise RuntimeError(f"all {self.num_pages - 1} pages are referenced")
        self._references[page] = 1
        return page

    def acquire(self, page: int) -> None:
        """Add a reference to a page that is published or already referenced."""
        if self._references[page] == 0:
            if page not in self._evictable:
                raise ValueError(f"page {page} is neither published nor referenced")
            del self._evictable[page]
        self._references[page] += 1

    def release(self, page: int) -> None:
        """Drop a reference. What is released first is evicted first: release deep pages first."""
        if self._references[page] == 0:
            raise ValueError(f"page {page} is not referenced")
        self._references[page] -= 1
        if self._references[page] == 0:
            if self._keys[page] is None:
                self._free.append(page)
            else:
                self._evictable[page] = None

    def publish(self, page: int, key: PageKey, depth: int = 0) -> bool:
        """Make a referenced page, whose contents are final, available to `lookup`.

        It replaces a less deep page of the key. Returns False and leaves the page unpublished if
        the key already has one as deep.
        """
        if self._references[page] == 0 or self._keys[page] is not None:
            raise ValueError(f"page {page} must be referenced and unpublished")
        earlier = self.lookup(key)
        if earlier is not None:
            if self._depths[earlier] >= depth:
                return False
            self._unpublish(earlier)
            if earlier in self._evictable:
                del self._evictable[earlier]
                self._free.append(earlier)
        self._published.setdefault(key.prefix, {})[key.lookahead] = page
        self._keys[page] = key
        self._depths[page] = depth
        return True

    def lookup(self, key: PageKey, depth: int = 0) -> int | None:
        """The page published under a key, if it is at least so deep."""
        page = self._published.get(key.prefix, {}).get(key.lookahead)
        return page if page is not None and self._depths[page] >= depth else None

    def candidates(self, prefix: bytes, depth: int = 0) -> Mapping[tuple[int, ...], int]:
        """All published pages of a token prefix that are at least so deep, by the tokens that
        followed it."""
        pages = self._published.get(prefix, {}).items()
        return {lookahead: page for lookahead, page in pages if self._depths[page] >= depth}

    def reset_prefix_cache(self) -> None:
        """Forget every published page; referenced ones stay with their owners."""
        for page, key in enumerate(self._keys):
            if key is not None:
                self._unpublish(page)
        self._free.extend(self._evictable)
        self._evictable.clear()

    def assert_consistent(self) -> None:
        """AssertionError unless every page is in exactly one state and the keys match."""
        free, evictable = set(self._free), set(self._evictable)
        assert len(free) == len(self._free), "a page is twice in the free list"
        for page in range(1, self.num_pages):
            states = (page in free) + (page in evictable) + (self._references[page] > 0)
            assert states == 1, f"page {page} is in {states} states"
            key = self._keys[page]
            assert key is None or self.lookup(key) == page, f"page {page} is not under its key"
            assert (page not in free) or key is None, f"free page {page} is published"
            assert (page not in evictable) or key is not None, f"page {page} is unpublished"
        assert self._references[NULL_PAGE] == 0 and NULL_PAGE not in free | evictable
        assert sum(map(len, self._published.values())) == sum(k is not None for k in self._keys)

    def _unpublish(self, page: int) -> None:
        key = self._keys[page]
        assert key is not None
        pages = self._published[key.prefix]
        del pages[key.lookahead]
        if not pages:
            del self._published[key.prefix]
        self._keys[page] = None
