"""The page pool: states, reference counts, eviction order and the table of published pages."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from mmtp_jax.cache.keys import PageKey
from mmtp_jax.cache.pool import CacheGroup, PagePool
from mmtp_jax.config import ConfigError


def key(prefix: int, *lookahead: int) -> PageKey:
    return PageKey(bytes([prefix]), lookahead)


def test_the_null_page_is_never_allocated() -> None:
    pool = PagePool(4)
    assert pool.num_free == 3
    assert sorted(pool.allocate() for _ in range(3)) == [1, 2, 3]
    assert (pool.num_free, pool.num_referenced) == (0, 3)
    with pytest.raises(RuntimeError, match="all 3 pages are referenced"):
        pool.allocate()
    with pytest.raises(ConfigError, match="num_pages must be >= 2"):
        PagePool(1)


def test_eviction_takes_the_page_released_longest_ago() -> None:
    pool = PagePool(4)
    pages = [pool.allocate() for _ in range(3)]
    for index, page in enumerate(pages):
        assert pool.publish(page, key(index))
    for page in reversed(pages):
        pool.release(page)
    pool.acquire(pages[2])
    pool.release(pages[2])
    assert pool.num_free == 3
    assert [pool.allocate() for _ in range(3)] == [pages[1], pages[0], pages[2]]
    assert all(pool.lookup(key(index)) is None for index in range(3))


def test_unpublished_pages_are_issued_before_any_eviction() -> None:
    pool = PagePool(3)
    first, second = pool.allocate(), pool.allocate()
    pool.publish(first, key(0))
    pool.release(first)
    pool.release(second)
    assert pool.allocate() == second
    assert pool.lookup(key(0)) == first


def test_the_first_publisher_of_a_key_keeps_it() -> None:
    pool = PagePool(3)
    first, second = pool.allocate(), pool.allocate()
    assert pool.publish(first, key(0, 1))
    assert not pool.publish(second, key(0, 1))
    assert pool.lookup(key(0, 1)) == first and pool.key(second) is None
    assert pool.publish(second, key(0, 2))
    assert dict(pool.candidates(b"\0")) == {(1,): first, (2,): second}
    assert dict(pool.candidates(b"\1")) == {}


def test_wrong_use_is_refused() -> None:
    pool = PagePool(3)
    with pytest.raises(ValueError, match="page 1 is neither published nor referenced"):
        pool.acquire(1)
    with pytest.raises(ValueError, match="page 1 is not referenced"):
        pool.release(1)
    with pytest.raises(ValueError, match="must be referenced and unpublished"):
        pool.publish(1, key(0))
    page = pool.allocate()
    pool.publish(page, key(0))
    with pytest.raises(ValueError, match="must be referenced and unpublished"):
        pool.publish(page, key(1))


def test_group_sizes_are_checked() -> None:
    with pytest.raises(ConfigError, match="page_size must be >= 1, got 0"):
        CacheGroup("a", "target", None, 8, 0)
    with pytest.raises(ConfigError, match="window must be >= 1 or None: 0"):
        CacheGroup("a", "target", 0, 8, 4)


@pytest.mark.parametrize(
    ("window", "position", "expected"),
    [(None, 100, 0), (1, 8, 2), (1, 7, 1), (2, 8, 1), (5, 8, 1), (6, 8, 0), (50, 8, 0)],
)
def test_first_page_read(window: int | None, position: int, expected: int) -> None:
    assert CacheGroup("a", "target", window, 8, 4).first_page_read(position) == expected


class PoolMachine(RuleBasedStateMachine):
    """Random use against a model with explicit lists."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(6)
        self.references: dict[int, int] = {}
        self.keys: dict[int, PageKey] = {}
        self.evictable: list[int] = []

    @precondition(lambda self: len(self.references) < 5)
    @rule()
    def allocate(self) -> None:
        used = set(self.references) | set(self.evictable)
        page = self.pool.allocate()
        if len(used) == 5:
            assert page == self.evictable.pop(0)
            del self.keys[page]
        else:
            assert page not in used
        self.references[page] = 1

    @rule(which=st.integers(0, 9))
    def acquire(self, which: int) -> None:
        pages = sorted(set(self.references) | set(self.evictable))
        if pages:
            page = pages[which % len(pages)]
            self.pool.acquire(page)
            self.references[page] = self.references.get(page, 0) + 1
            self.evictable = [other for other in self.evictable if other != page]

    @precondition(lambda self: self.references)
    @rule(which=st.integers(0, 9))
    def release(self, which: int) -> None:
        page = sorted(self.references)[which % len(self.references)]
        self.pool.release(page)
        self.references[page] -= 1
        if self.references[page] == 0:
            del self.references[page]
            if page in self.keys:
                self.evictable.append(page)

    @rule(which=st.integers(0, 9), prefix=st.integers(0, 2), lookahead=st.integers(0, 1))
    def publish(self, which: int, prefix: int, lookahead: int) -> None:
        pages = sorted(set(self.references) - set(self.keys))
        if pages:
            page, new = pages[which % len(pages)], key(prefix, lookahead)
            published = self.pool.publish(page, new)
            assert published == (new not in self.keys.values())
            if published:
                self.keys[page] = new

    @rule()
    def reset(self) -> None:
        self.pool.reset_prefix_cache()
        self.keys.clear()
        self.evictable.clear()

    def teardown(self) -> None:
        self.pool.assert_consistent()
        assert self.pool.num_referenced == len(self.references)
        assert self.pool.num_free == 5 - len(self.references)
        for page in range(1, 6):
            assert self.pool.references(page) == self.references.get(page, 0)
            assert self.pool.key(page) == self.keys.get(page)
        for page, published in self.keys.items():
            assert self.pool.lookup(published) == page


TestPoolMachine = PoolMachine.TestCase
