"""How many pages every cache group gets, from a page count, a byte budget or the device's
memory.
"""

from __future__ import annotations

import jax
import numpy as np

from mmtp_jax.cache.layout import CacheLayout
from mmtp_jax.cache.manager import CacheGroup
from mmtp_jax.cache.pages import bytes_per_page
from mmtp_jax.config import CacheConfig, ConfigError, EngineConfig

CPU_CACHE_BYTES = 1 << 30


def cache_budget(config: CacheConfig) -> int:
    """Bytes the cache may take: as configured, else a share of the accelerator's free memory."""
    if config.cache_bytes is not None:
        return config.cache_bytes
    stats = jax.devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    if jax.default_backend() == "cpu" or limit is None:
        return CPU_CACHE_BYTES
    return max(int(limit * config.memory_fraction) - int(stats.get("bytes_in_use", 0)), 0)


def cache_groups(
    layout: CacheLayout, config: EngineConfig, dtype: np.dtype, max_model_len: int
) -> tuple[CacheGroup, ...]:
    """The host's view of every group, with its page count (the null page included).

    All groups get the same number of pages, at most what `max_num_seqs` requests of `max_model_len`
    positions can use twice over. Raises `ConfigError` if the budget holds no page at all.
    """
    pages, page_size = config.cache.num_pages, config.cache.page_size
    if pages is None:
        cost = sum(bytes_per_page(group, page_size, dtype) for group in layout.groups)
        budget = cache_budget(config.cache)
        useful = 2 * config.max_num_seqs * -(-max_model_len // page_size) + 1
        pages = min(budget // cost, useful)
        if pages < 2:
            raise ConfigError(
                f"the cache budget of {budget} bytes holds no page of {cost} bytes;"
                " raise cache_bytes or memory_fraction"
            )
    return tuple(
        CacheGroup(group.name, group.owner, group.window, pages, page_size)
        for group in layout.groups
    )


def fit_model_len(layout: CacheLayout, config: EngineConfig, dtype: np.dtype, wanted: int) -> int:
    """The largest context up to `wanted` that one request can fill with this cache."""
    groups = cache_groups(layout, config, dtype, wanted)
    return min(wanted, (groups[0].num_pages - 1) * config.cache.page_size)
