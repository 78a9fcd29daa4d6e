"""The longest reusable prefix of a token list, over all cache groups.

Target pages are found by tokens [0, E), module pages by tokens [0, E + N); one more module page may
be reused in part. A windowed group needs only the pages still read from the restart point on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mmtp_jax.cache.keys import PageKey, PrefixKeys
from mmtp_jax.cache.pool import CacheGroup, PagePool


@dataclass(frozen=True)
class PrefixHit:
    """Compute restarts at `computed`.

    `target_pages` and `module_pages` whole pages are shared. The entries of the modules that will
    run are exact below `exact`, beyond the whole pages when a part of one more is reused: `sources`
    has it by group.
    """

    computed: int = 0
    exact: int = 0
    target_pages: int = 0
    module_pages: int = 0
    sources: Mapping[int, int] = field(default_factory=dict)


def page_key(group: CacheGroup, keys: PrefixKeys, index: int, num_modules: int) -> PageKey:
    """The key of page `index` in a group."""
    if group.owner == "target":
        return keys.target(index)
    return keys.module(index, num_modules)


@dataclass(frozen=True)
class PrefixSearch:
    """One search: the groups with their pools, the number of modules N, a request's keys, and how
    many modules are to have entries."""

    groups: Sequence[CacheGroup]
    pools: Sequence[PagePool]
    num_modules: int
    keys: PrefixKeys
    depth: int

    def run(self) -> PrefixHit:
        module_pages, exact, sources = self._modules()
        target_pages = self._target(exact)
        computed = self._restart(target_pages, exact)
        if self.depth == 0:
            exact = computed
        return PrefixHit(computed, exact, target_pages, module_pages, sources)

    def page(self, group: int, index: int) -> int | None:
        """The published page `index` of a group, or None."""
        key = page_key(self.groups[group], self.keys, index, self.num_modules)
        needed = self.depth if self.groups[group].owner == "modules" else 0
        return self.pools[group].lookup(key, needed)

    def _restart(self, target_pages: int, exact: int) -> int:
        """Modules need the target's hidden states from `exact` on; one token is always computed."""
        computed = target_pages * self.keys.page_size
        if self.depth:
            computed = min(computed, exact)
        return min(computed, len(self.keys.tokens) - 1)

    def _target(self, exact: int) -> int:
        """The number of target pages to reuse, all target groups agreeing."""
        num_pages = len(self.keys.tokens) // self.keys.page_size
        while True:
            missing = self._missing("target", self._restart(num_pages, exact), num_pages)
            if missing is None:
                return num_pages
            num_pages = missing

    def _modules(self) -> tuple[int, int, dict[int, int]]:
        """(whole pages, exact length, sources of the partly reused page by group)."""
        if self.depth == 0:
            return 0, 0, {}
        num_pages = max(0, len(self.keys.tokens) - self.num_modules) // self.keys.page_size
        while True:
            sources, gain = self._partial_page(num_pages)
            exact = num_pages * self.keys.page_size + gain
            missing = self._missing("modules", exact, num_pages)
            if missing is None:
                return num_pages, exact, sources
            num_pages = missing

    def _missing(
        self, owner: Literal["target", "modules"], position: int, num_pages: int
    ) -> int | None:
        """The first page below `num_pages` that is read from `position` on and that a group lacks.

        Shorter hits restart earlier and so read it too unless they end before it: the next length
        to try is the page's index. None: all pages are there.
        """
        missing = []
        for position_of_group, group in enumerate(self.groups):
            if group.owner != owner:
                continue
            for index in range(group.first_page_read(position), num_pages):
                if self.page(position_of_group, index) is None:
                    missing.append(index)
                    break
        return min(missing, default=None)

    def _partial_page(self, index: int) -> tuple[dict[int, int], int]:
        """Pages by group that share the tokens of page `index`, and how many positions are exact.

        With s agreeing lookahead tokens a page that ends at E is exact below E - N + s. A page of
        at most N positions is not worth a copy.
        """
        page_size, keys = self.keys.page_size, self.keys
        if page_size <= self.num_modules or (index + 1) * page_size > len(keys.tokens):
            return {}, 0
        prefix = keys.prefix(index)
        lookahead = keys.lookahead(index, self.num_modules)
        sources, agreeing = {}, self.num_modules
        for position, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            if group.owner != "modules":
                continue
            candidates = pool.candidates(prefix, self.depth)
            if not candidates:
                return {}, 0
            best = max(candidates, key=lambda other: _common_prefix(lookahead, other))
            sources[position] = candidates[best]
            agreeing = min(agreeing, _common_prefix(lookahead, best))
        return sources, page_size - self.num_modules + agreeing


def _common_prefix(left: Iterable[int], right: Iterable[int]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count
