"""Page tables of running requests over several cache groups, and prefix reuse between requests.

A group is a set of layers with one page pool and one page table per request. It belongs to the
target or to the MTP modules, and keeps either every position or those a sliding window still reads.
Exactness rests on three rules. Target pages are keyed by tokens [0, E), module pages by tokens
[0, E + N). A page is published when no later step can write it (target: E <= computed; modules:
also E + N <= committed length) and never changes afterwards. A partly reused page is copied. Where
a request leaves modules out for good, its pages are published for the others, and found by requests
that need no more.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mmtp_jax.cache.keys import PrefixKeys
from mmtp_jax.cache.pool import NULL_PAGE, CacheGroup, PagePool
from mmtp_jax.cache.prefix import PrefixHit, PrefixSearch, page_key
from mmtp_jax.config import require

__all__ = ["Admission", "CacheGroup", "CacheManager", "PageCopy", "PageTables"]


@dataclass(slots=True)
class GroupTable:
    """One request's pages in one group, by page index; null where nothing is needed.

    Pages [0, num_final) are published, shared, duplicates of published ones or of modules that do
    not run: this request no longer writes them. Pages [0, num_retired) are null.
    """

    pages: list[int]
    num_final: int
    num_retired: int


@dataclass(eq=False, slots=True)
class PageTables:
    """The handle of an admitted request: one table per group, in the manager's order.

    In every group, `capacity` positions have pages. All groups of the target are final for the
    first `final_target` positions, and those of the modules for `final_modules`. Most steps change
    none of it, and then need not look at the groups.
    """

    keys: PrefixKeys
    groups: tuple[GroupTable, ...]
    capacity: int = 0
    final_target: int = 0
    final_modules: int = 0


class PageCopy(NamedTuple):
    group: int
    source: int
    destination: int


@dataclass(frozen=True)
class Admission:
    """What a slot starts with.

    Compute starts at position `computed`; the entries of every module that runs are exact below
    `exact`. `valid` gives per group the number of positions that it does not write (it may exceed
    `computed`, because groups are hit separately). `rows` are the first entries of the page tables.
    The copies of an admission run before its first step and before the copies of any
    later admission: from then on a source may be issued again.
    """

    tables: PageTables
    computed: int
    exact: int
    valid: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    copies: tuple[PageCopy, ...]


class CacheManager:
    """Allocates, shares, publishes and frees the pages of all groups (host bookkeeping only).

    Modules may run over the last `behind` computed positions again; None: N - 1, which they rewrite
    after rejected drafts where all of them run in every step.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_modules: int,
        enable_prefix_caching: bool = True,
        behind: int | None = None,
    ) -> None:
        owners = {group.owner for group in groups}
        sizes = {group.page_size for group in groups}
        require("target" in owners, "the cache needs at least one target group")
        require(len(sizes) == 1, f"all cache groups need the same page_size, got {sorted(sizes)}")
        require(
            ("modules" in owners) == (num_modules > 0),
            f"module cache groups are needed exactly when num_modules > 0, got {num_modules}",
        )
        self.groups = tuple(groups)
        self.num_modules = num_modules
        self.behind = max(num_modules - 1, 0) if behind is None else behind
        self.enable_prefix_caching = enable_prefix_caching
        self.page_size = groups[0].page_size
        self.pools = tuple(PagePool(group.num_pages) for group in groups)
        self._windowed = tuple(
            (index, reach)
            for index, group in enumerate(groups)
            if (reach := group.reach(self.behind)) is not None
        )
        self._admitted: set[PageTables] = set()

    @property
    def usage(self) -> float:
        """The fraction of pages in use in the fullest group."""
        return max(pool.num_referenced / (pool.num_pages - 1) for pool in self.pools)

    def prefix_keys(self, tokens: Sequence[int]) -> PrefixKeys:
        """Keys over a request's token list, which may grow; they serve all its admissions."""
        return PrefixKeys(tokens, self.page_size)

    def admit(
        self, keys: PrefixKeys, *, reuse: bool = True, depth: int | None = None
    ) -> Admission | None:
        """Start a request on the longest reusable prefix of `keys.tokens`; None if out of pages.

        Only the first `depth` modules will run for it (None: all). At least one token is left to
        compute. Pages that are hit beyond `computed` are shared all the same: that saves pages, and
        no group writes below its valid length.
        """
        depth = self.num_modules if depth is None else depth
        search = PrefixSearch(self.groups, self.pools, self.num_modules, keys, depth)
        hit = search.run() if self.enable_prefix_caching and reuse else PrefixHit()
        tables = []
        for position, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            restart, num_pages = hit.computed, hit.target_pages
            first = num_pages  # no module runs
            if group.owner == "modules" and depth > 0:
                restart, num_pages = hit.exact, hit.module_pages
            if group.owner == "target" or depth > 0:
                first = min(group.first_page_read(restart), num_pages)
            found = [search.page(position, index) for index in range(first, num_pages)]
            shared = [page for page in found if page is not None]
            for page in shared:
                pool.acquire(page)
            tables.append(GroupTable([NULL_PAGE] * first + shared, num_pages, first))
        handle = PageTables(keys, tuple(tables))
        self._admitted.add(handle)
        copies = self._copy_partial_page(handle, hit.sources)
        if copies is None:
            self.free(handle)
            return None
        handle.capacity = self.page_size * min(len(table.pages) for table in tables)
        self._note_final(handle)
        valid = {"target": hit.target_pages * self.page_size, "modules": hit.exact}
        return Admission(
            tables=handle,
            computed=hit.computed,
            exact=hit.exact,
            valid=tuple(valid[group.owner] for group in self.groups),
            rows=tuple(tuple(table.pages) for table in handle.groups),
            copies=copies,
        )

    def reserve(
        self, tables: PageTables, upto: int, ahead: int = 0
    ) -> Sequence[Sequence[tuple[int, int]]] | None:
        """Pages for all positions below `upto`: new (index, page) table entries by group, () if all
        groups have them. For those below `ahead`, too, if that leaves half of every pool free.

        None, with nothing allocated, if a pool is out of pages.
        """
        num_pages = -(-max(upto, ahead) // self.page_size)
        if num_pages * self.page_size <= tables.capacity:
            return ()
        for table, pool in zip(tables.groups, self.pools, strict=True):
            left = pool.num_free - (num_pages - len(table.pages))
            if ahead > upto and left < pool.num_pages // 2:
                return self.reserve(tables, upto)
            if left < 0:
                return None
        entries = []
        for table, pool in zip(tables.groups, self.pools, strict=True):
            first = len(table.pages)
            table.pages.extend([pool.allocate() for _ in range(first, num_pages)])
            entries.append(list(enumerate(table.pages[first:], first)))
        tables.capacity = num_pages * self.page_size
        return entries

    def publish(
        self, tables: PageTables, computed: int, exact: int, depth: int | None = None
    ) -> None:
        """Publish pages that became final.

        `computed` positions are those of a step whose output was read; the first `depth` modules
        (None: all) hold the first `exact` for good, those with N committed tokens after them, and
        the other modules will not run any more.
        """
        if not self.enable_prefix_caching:
            return
        of_modules = min(computed, exact)
        if computed < tables.final_target + self.page_size and (
            of_modules < tables.final_modules + self.page_size
        ):
            return
        modules = self.num_modules
        depth = modules if depth is None else depth
        for group, pool, table in zip(self.groups, self.pools, tables.groups, strict=True):
            end, needed = computed, 0
            if group.owner == "modules":
                end, needed = of_modules, depth
            num_final = end // self.page_size
            if num_final > table.num_final:
                if group.owner == "target" or depth > 0:
                    # What was left out for long may have been retired meanwhile.
                    for index in range(max(table.num_final, table.num_retired), num_final):
                        key = page_key(group, tables.keys, index, modules)
                        pool.publish(table.pages[index], key, needed)
                table.num_final = num_final
        self._note_final(tables)

    def _note_final(self, tables: PageTables) -> None:
        """Note how many positions are final in all groups of the target, and of the modules."""
        found = {"target": sys.maxsize, "modules": sys.maxsize}
        for group, table in zip(self.groups, tables.groups, strict=True):
            found[group.owner] = min(found[group.owner], self.page_size * table.num_final)
        tables.final_target, tables.final_modules = found["target"], found["modules"]

    def retire(self, tables: PageTables, computed: int) -> None:
        """Give back pages that no window reaches once `computed` positions are executed.

        The device's table entries stay as they are: no later row reads them. Call after `publish`.
        """
        for index, reach in self._windowed:
            table, pool = tables.groups[index], self.pools[index]
            first = min(max(0, computed - reach) // self.page_size, len(table.pages))
            for retired in range(table.num_retired, first):
                pool.release(table.pages[retired])
                table.pages[retired] = NULL_PAGE
                table.num_retired = retired + 1

    def free(self, tables: PageTables) -> None:
        """Give back all pages. A step in flight may still use them: their next owner runs later."""
        self._admitted.remove(tables)
        for pool, table in zip(self.pools, tables.groups, strict=True):
            # Deepest first: a prefix outlives what follows it.
            for page in reversed(table.pages[table.num_retired :]):
                pool.release(page)

    def reset_prefix_cache(self) -> None:
        """Forget all published pages; running requests keep theirs."""
        for pool in self.pools:
            pool.reset_prefix_cache()

    def assert_consistent(self) -> None:
        """AssertionError unless references match the tables and only final pages are shared."""
        for position, pool in enumerate(self.pools):
            pool.assert_consistent()
            final: dict[int, list[bool]] = {}
            for tables in self._admitted:
                table = tables.groups[position]
                assert not any(table.pages[: table.num_retired]), "a retired page is mapped"
                assert all(table.pages[table.num_retired :]), "a live page is null"
                for index in range(table.num_retired, len(table.pages)):
                    final.setdefault(table.pages[index], []).append(index < table.num_final)
            for page in range(1, pool.num_pages):
                owners = final.get(page, [])
                assert pool.references(page) == len(owners), f"page {page}: references differ"
                assert len(owners) < 2 or all(owners), f"page {page} is shared and writable"
                assert pool.key(page) is None or all(owners), f"page {page} can change"

    def _copy_partial_page(
        self, tables: PageTables, sources: Mapping[int, int]
    ) -> tuple[PageCopy, ...] | None:
        """Give each module group a private page for its partly reused one; None if out of pages.

        Sources are held meanwhile, or allocating a destination could evict them.
        """
        for group, source in sources.items():
            self.pools[group].acquire(source)
        copies = None
        if all(self.pools[group].num_free for group in sources):
            copies = tuple(
                PageCopy(group, source, self.pools[group].allocate())
                for group, source in sources.items()
            )
            for copy in copies:
                tables.groups[copy.group].pages.append(copy.destination)
        for group, source in sources.items():
            self.pools[group].release(source)
        return copies
