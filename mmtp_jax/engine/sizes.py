"""How many pages every cache group gets, from a page count, a byte budget or the device's
memory.
"""

from __future__ import annotations

import bisect
import dataclasses

import jax
import numpy as np

from mmtp_jax.cache.layout import CacheLayout
from mmtp_jax.cache.manager import CacheGroup
from mmtp_jax.cache.pages import bytes_per_page
from mmtp_jax.config import CacheConfig, ConfigError, EngineConfig, SpeculativeConfig

CPU_CACHE_BYTES = 1 << 30
# Where draft lengths vary, modules that were left out of steps can come back as long as they are
# not further behind; then only a restart brings them back. Rows of a step are cheap as long as they
# are few: a dozen steps of a module that would not have paid.
KEPT_BEHIND = 32


def cache_budget(config: CacheConfig) -> int:
    """Bytes the cache may take: as configured, else a share of the accelerator's free memory."""
    if config.cache_bytes is not None:
        return config.cache_bytes
    stats = jax.devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    if jax.default_backend() == "cpu" or limit is None:
        return CPU_CACHE_BYTES
    return max(int(limit * config.memory_fraction) - int(stats.get("bytes_in_use", 0)), 0)


def behind_of(speculative: SpeculativeConfig, num_modules: int) -> int:
    """The last computed positions that modules may run over again: those after rejected drafts, or
    as many as they may miss."""
    if speculative.adaptive and num_modules:
        return max(KEPT_BEHIND, num_modules)
    return max(num_modules - 1, 0)


def cache_groups(
    layout: CacheLayout, config: EngineConfig, dtype: np.dtype, max_model_len: int
) -> tuple[CacheGroup, ...]:
    """The host's view of every group, with its page count (the null page included).

    With `num_pages` all groups get that many. Otherwise they share the budget: each gets the same
    number of pages, but none more than `max_num_seqs` requests of `max_model_len` positions can use
    twice over, which for a windowed group is little. Raises `ConfigError` if the budget holds no
    page at all.
    """
    page_size = config.cache.page_size
    groups = tuple(
        CacheGroup(group.name, group.owner, group.window, config.cache.num_pages or 0, page_size)
        for group in layout.groups
    )
    if config.cache.num_pages is not None:
        return groups
    costs = [bytes_per_page(group, page_size, dtype) for group in layout.groups]
    useful = [
        1 + 2 * config.limits.max_num_seqs * _pages_of_one(group, layout, config, max_model_len)
        for group in groups
    ]

    def total(pages: int) -> int:
        return sum(min(pages, most) * cost for most, cost in zip(useful, costs, strict=True))

    budget = cache_budget(config.cache)
    if total(2) > budget:
        raise ConfigError(
            f"the cache budget of {budget} bytes holds no page of {sum(costs)} bytes;"
            " raise cache_bytes or memory_fraction"
        )
    pages = bisect.bisect_right(range(max(useful) + 1), budget, key=total) - 1
    return tuple(
        dataclasses.replace(group, num_pages=min(pages, most))
        for group, most in zip(groups, useful, strict=True)
    )


def fit_model_len(layout: CacheLayout, config: EngineConfig, dtype: np.dtype, wanted: int) -> int:
    """The largest context up to `wanted` that one request can fill with this cache."""
    fitting = wanted
    for group in cache_groups(layout, config, dtype, wanted):
        if group.num_pages - 1 < _pages_of_one(group, layout, config, wanted):
            fitting = min(fitting, (group.num_pages - 1) * config.cache.page_size)
    return fitting


def _pages_of_one(
    group: CacheGroup, layout: CacheLayout, config: EngineConfig, max_model_len: int
) -> int:
    rows = config.limits.max_num_batched_tokens + config.speculative.num_drafts
    behind = behind_of(config.speculative, len(layout.modules))
    return group.pages_for_one_request(behind, max_model_len, rows)
