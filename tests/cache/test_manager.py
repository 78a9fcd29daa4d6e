"""Page tables and prefix reuse, with entries that stand for the tokens they were computed from."""

from __future__ import annotations

import random

import pytest
from cache.symbolic_device import Language, SymbolicDevice
from hypothesis import given, settings
from hypothesis import strategies as st

from mmtp_jax.cache.manager import Admission, CacheGroup, CacheManager
from mmtp_jax.config import ConfigError


def make_cache(
    num_modules: int,
    page_size: int,
    num_pages: int = 40,
    windows: tuple[int | None, ...] = (None,),
    prefix_caching: bool = True,
) -> CacheManager:
    """Per window a target group and, if there are modules, one of theirs."""
    groups = []
    for window in windows:
        groups.append(CacheGroup(f"target/{window}", "target", window, num_pages + 1, page_size))
        if num_modules:
            groups.append(
                CacheGroup(f"modules/{window}", "modules", window, num_pages + 1, page_size)
            )
    return CacheManager(groups, num_modules, prefix_caching)


class Runner:
    """Runs prompts one after the other through a cache and a checking device."""

    def __init__(self, cache: CacheManager, seed: int = 0) -> None:
        self.cache = cache
        self.device = SymbolicDevice(cache, Language(), random.Random(seed))

    def start(self, tokens: list[int], slot: int = 0, depth: int | None = None) -> Admission:
        depth = self.cache.num_modules if depth is None else depth
        admission = self.cache.admit(self.cache.prefix_keys(tokens), depth=depth)
        assert admission is not None
        self.device.admit(slot, tokens, len(tokens) + 1, depth, admission)
        self.cache.assert_consistent()
        return admission

    def run(self, tokens: list[int], depth: int | None = None) -> Admission:
        """Compute all of `tokens` with so many modules (None: all), publish them and free the
        pages."""
        depth = self.cache.num_modules if depth is None else depth
        admission = self.start(tokens, depth=depth)
        entries = self.cache.reserve(admission.tables, len(tokens))
        assert entries is not None
        num_rows = len(tokens) - admission.computed
        capacity = admission.tables.capacity
        modules = self.cache.num_modules
        emitted = self.device.step(0, num_rows, depth, capacity, entries)
        assert len(emitted) == 1
        self.cache.publish(admission.tables, len(tokens), len(tokens) - modules, depth)
        self.device.check_published()
        self.cache.retire(admission.tables, len(tokens))
        self.cache.free(admission.tables)
        self.cache.assert_consistent()
        return admission


def exact_length(shared: int, num_modules: int, page_size: int) -> int:
    """How far modules can be reused from a long text with `shared` equal tokens."""
    whole = max(0, shared - num_modules) // page_size * page_size
    if page_size > num_modules and whole + page_size <= shared:
        return shared - num_modules  # by a copy of a part of the next page
    return whole


@pytest.mark.parametrize("num_modules", [1, 2, 3])
@pytest.mark.parametrize("page_size", [2, 4])
def test_a_page_is_not_found_from_another_continuation(num_modules: int, page_size: int) -> None:
    """A and B share a page's tokens but not what follows; C continues B."""
    runner = Runner(make_cache(num_modules, page_size))
    page = list(range(10, 10 + page_size))
    after_a, after_b = [30 + i for i in range(page_size)], [50 + i for i in range(page_size)]
    runner.run([*page, *after_a, *range(70, 80)])
    b = runner.run([*page, *after_b, *range(80, 90)])
    assert b.exact == exact_length(page_size, num_modules, page_size)
    # The device compares every reused entry with what C's own tokens demand.
    c = runner.run([*page, *after_b, *range(80, 82), 99])
    assert c.exact == exact_length(2 * page_size + 2, num_modules, page_size) > 0
    assert c.computed == min(c.exact, c.valid[0])


@pytest.mark.parametrize("num_modules", range(9))
@pytest.mark.parametrize("page_size", [2, 4, 16])
def test_every_shared_length_around_a_page_end(num_modules: int, page_size: int) -> None:
    end = 2 * page_size
    for shared in range(end - 1, end + num_modules + 2):
        runner = Runner(make_cache(num_modules, page_size))
        first = list(range(100, 100 + 4 * page_size + num_modules))
        runner.run(first)
        second = first[:shared] + list(range(300, 300 + page_size + num_modules + 1))
        admission = runner.run(second)
        target = shared // page_size * page_size
        exact = exact_length(shared, num_modules, page_size) if num_modules else target
        assert (admission.valid[0], admission.exact) == (target, exact)
        assert admission.computed == min(target, exact)
        assert len(admission.copies) == (exact % page_size > 0)


@pytest.mark.parametrize("num_modules", [0, 1, 3])
def test_at_least_one_token_is_computed(num_modules: int) -> None:
    runner = Runner(make_cache(num_modules, 4))
    tokens = list(range(16))
    runner.run(tokens + [16] * num_modules)
    again = runner.run(tokens)
    assert again.computed == 15 if num_modules == 0 else again.computed == 16 - num_modules
    assert runner.run(tokens[:1]).computed == 0


def test_the_copy_source_survives_and_the_copy_is_private() -> None:
    runner = Runner(make_cache(2, 4))
    runner.run([0, 1, 2, 3, 4, 5, 6, 7])
    admission = runner.start([0, 1, 2, 3, 9])
    (copy,) = admission.copies
    pool = runner.cache.pools[copy.group]
    assert admission.exact == 2 and admission.rows[1] == (copy.destination,)
    assert pool.key(copy.source) is not None and pool.references(copy.source) == 0
    assert pool.key(copy.destination) is None and pool.references(copy.destination) == 1


def test_no_copy_replaces_its_own_source() -> None:
    """With every page referenced but the source, there is no page for the copy."""
    cache = make_cache(2, 4, num_pages=2)
    runner = Runner(cache)
    runner.run([0, 1, 2, 3, 4, 5])
    blocker = runner.start([9], slot=1)
    assert cache.reserve(blocker.tables, 1) is not None
    keys = cache.prefix_keys([0, 1, 2, 3, 9])
    assert cache.admit(keys) is None
    cache.assert_consistent()
    assert [pool.num_free for pool in cache.pools] == [1, 1]
    cache.free(blocker.tables)
    admission = cache.admit(keys)
    assert admission is not None and len(admission.copies) == 1


def test_hits_need_every_group() -> None:
    """The restart is bounded by the owner with the shorter hit; whole pages are shared anyway."""
    cache = make_cache(1, 4)
    runner = Runner(cache)
    tokens = list(range(20))
    runner.run(tokens)
    cache.pools[0].reset_prefix_cache()
    admission = runner.run(tokens)
    assert (admission.computed, admission.exact, admission.valid) == (0, 16, (0, 16))
    cache.pools[1].reset_prefix_cache()
    admission = runner.run(tokens)
    assert (admission.computed, admission.exact, admission.valid) == (0, 0, (20, 0))


def test_windowed_groups_need_only_what_is_still_read() -> None:
    cache = make_cache(2, 4, windows=(5,))
    runner = Runner(cache)
    runner.run(list(range(38)))
    for pool in cache.pools:  # of 9 published pages each keeps the last 5
        for page in [pool.allocate() for _ in range(pool.num_free - 5)]:
            pool.release(page)
    admission = runner.start([*range(32), 99, 98])
    assert (admission.computed, admission.exact, admission.valid) == (30, 30, (32, 30))
    # Compute starts at 30 and reads from 26 on: page 6 and what follows it.
    assert [list(map(bool, row)) for row in admission.rows] == [[False] * 6 + [True] * 2] * 2
    assert runner.start([*range(16), 99], slot=1).computed == 0


def test_retire_keeps_the_window_and_what_modules_rewrite() -> None:
    cache = make_cache(3, 2, windows=(None, 4))
    admission = cache.admit(cache.prefix_keys(list(range(40))))
    assert admission is not None
    tables = admission.tables
    assert cache.reserve(tables, 24) is not None
    cache.publish(tables, 20, 37)
    cache.retire(tables, 20)
    retired = {
        group.name: table.num_retired
        for group, table in zip(cache.groups, tables.groups, strict=True)
    }
    # Reads begin at 20 - 3 = 17 (page 8), for modules at 20 - 3 - 2 = 15 (page 7).
    assert retired == {"target/None": 0, "modules/None": 0, "target/4": 8, "modules/4": 7}
    cache.assert_consistent()
    cache.retire(tables, 20)
    assert tables.capacity == 24
    cache.free(tables)
    assert all(pool.num_referenced == 0 for pool in cache.pools)


def test_publish_bounds_are_tight() -> None:
    cache = make_cache(3, 4)
    tokens = list(range(30))
    admission = cache.admit(cache.prefix_keys(tokens))
    assert admission is not None
    tables = admission.tables
    cache.reserve(tables, 16)
    for computed, committed, expected in (
        (3, 4, (0, 0)),
        (4, 5, (1, 0)),
        (5, 6, (1, 0)),
        (6, 7, (1, 1)),
        (7, 30, (1, 1)),
        (8, 30, (2, 2)),
        (16, 18, (4, 3)),
        (16, 19, (4, 4)),
    ):
        cache.publish(tables, computed, committed - 3)
        assert tuple(table.num_final for table in tables.groups) == expected
        cache.assert_consistent()


def test_reserve_is_all_or_nothing() -> None:
    groups = [
        CacheGroup("target", "target", None, 9, 4),
        CacheGroup("modules", "modules", None, 4, 4),
    ]
    cache = CacheManager(groups, 1)
    admission = cache.admit(cache.prefix_keys([0]))
    assert admission is not None
    tables = admission.tables
    assert tables.capacity == 0
    entries = cache.reserve(tables, 5)
    assert entries is not None
    assert [[index for index, _ in group] for group in entries] == [[0, 1], [0, 1]]
    assert tables.capacity == 8
    assert cache.reserve(tables, 16) is None
    assert [pool.num_free for pool in cache.pools] == [6, 1]
    assert cache.reserve(tables, 8) == ()
    assert cache.reserve(tables, 9) is not None
    assert cache.usage == 1.0


def test_pages_ahead_leave_half_of_every_pool() -> None:
    groups = [
        CacheGroup("target", "target", None, 41, 4),
        CacheGroup("modules", "modules", None, 21, 4),
    ]
    cache = CacheManager(groups, 1)
    admission = cache.admit(cache.prefix_keys([0]))
    assert admission is not None
    tables = admission.tables
    for upto, ahead, capacity in (
        (5, 17, 20),
        (20, 20, 20),
        (20, 40, 40),  # 10 of 20 pages
        (40, 41, 40),  # the 11th is not needed yet
        (41, 60, 44),
        (44, 48, 44),
    ):
        new = cache.reserve(tables, upto, ahead)
        assert new is not None and tables.capacity == capacity
        cache.assert_consistent()
    assert cache.reserve(tables, 81, 90) is None
    assert cache.reserve(tables, 80, 90) is not None
    cache.free(tables)
    assert all(pool.num_referenced == 0 for pool in cache.pools)


def test_deep_pages_are_evicted_first() -> None:
    cache = make_cache(0, 2, num_pages=4)
    runner = Runner(cache)
    runner.run(list(range(8)))
    assert runner.start([7]).computed == 0
    tables = runner.start([9], slot=1).tables
    assert cache.reserve(tables, 2) is not None  # evicts one of the four
    assert runner.start(list(range(8)), slot=2).computed == 6


def test_pages_are_found_by_requests_that_need_no_more_modules() -> None:
    tokens = list(range(20))
    for published in range(4):
        for needed in range(4):
            runner = Runner(make_cache(3, 4))
            runner.run(tokens, depth=published)
            again = runner.run(tokens, depth=needed)
            reused = 19 if needed == 0 else 16 if needed <= published else 0
            assert again.computed == reused
            # What was computed with more modules replaces what it repeats.
            most = max(published, needed)
            assert runner.run(tokens, depth=most).computed == (16 if most else 19)


def test_without_prefix_caching_nothing_is_reused() -> None:
    runner = Runner(make_cache(2, 4, prefix_caching=False))
    for _ in range(2):
        assert runner.run(list(range(16))).computed == 0


def test_reset_forgets_pages_of_running_requests_too() -> None:
    runner = Runner(make_cache(1, 4))
    tokens = list(range(12))
    runner.run(tokens)
    sharing = runner.start(tokens, slot=1)
    runner.cache.reset_prefix_cache()
    runner.cache.assert_consistent()
    assert runner.run(tokens).computed == 0
    runner.cache.free(sharing.tables)
    runner.cache.assert_consistent()
    assert runner.run(tokens).computed == 8


@pytest.mark.parametrize(
    ("groups", "num_modules", "message"),
    [
        ([("target", 4), ("modules", 8)], 1, r"same page_size, got \[4, 8\]"),
        ([("target", 4)], 1, "module cache groups are needed exactly when num_modules > 0, got 1"),
        ([("target", 4), ("modules", 4)], 0, "exactly when num_modules > 0, got 0"),
        ([("modules", 4)], 1, "at least one target group"),
    ],
)
def test_impossible_groups_are_refused(
    groups: list[tuple[str, int]], num_modules: int, message: str
) -> None:
    made = [CacheGroup(owner, owner, None, 8, size) for owner, size in groups]  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        CacheManager(made, num_modules)


@settings(deadline=None, max_examples=60)
@given(
    num_modules=st.integers(0, 8),
    page_size=st.sampled_from([1, 2, 3, 4, 8, 16]),
    windows=st.sampled_from([(None,), (4,), (None, 3, 9)]),
    spare=st.sampled_from([0, 2, 30]),
    prompts=st.lists(
        st.tuples(
            st.integers(0, 9),
            st.integers(0, 40),
            st.lists(st.integers(0, 1), min_size=1),
            st.integers(0, 8),
        ),
        min_size=2,
        max_size=10,
    ),
)
def test_hits_hold_what_the_request_would_compute(
    num_modules: int,
    page_size: int,
    windows: tuple[int | None, ...],
    spare: int,
    prompts: list[tuple[int, int, list[int], int]],
) -> None:
    """Prompts branch off earlier ones anywhere and leave some modules out; the device compares all
    reused entries."""
    runner = Runner(make_cache(num_modules, page_size, -(-48 // page_size) + spare, windows))
    texts: list[list[int]] = []
    for source, shared, new, depth in prompts:
        prefix = texts[source % len(texts)][:shared] if texts else [0, 1, 0, 0, 1, 1, 0, 1] * 5
        texts.append((prefix + new)[:48])
        runner.run(texts[-1], min(depth, num_modules))
    assert all(pool.num_referenced == 0 for pool in runner.cache.pools)
