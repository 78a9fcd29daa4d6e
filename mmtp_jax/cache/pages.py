"""Device side of the paged cache: one stacked array per stream of a group, donated through the
step.

Page 0 is the null page: padding rows and freed table entries point at it and it is never written.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from mmtp_jax.cache.layout import CacheLayout, GroupSpec

Streams = dict[str, jax.Array]  # stream name -> [L, P, page, ...]
Pages = tuple[Streams, ...]  # per group


def bytes_per_page(group: GroupSpec, page_size: int, dtype: np.dtype) -> int:
    """Bytes of one page over all layers and streams of the group."""
    return group.values_per_position() * page_size * dtype.itemsize


def allocate(
    layout: CacheLayout, num_pages: tuple[int, ...], page_size: int, dtype: np.dtype
) -> Pages:
    """Zeroed page arrays, `[layers, pages, page, ...]` per group and stream."""
    return tuple(
        {
            name: jnp.zeros((group.num_layers, pages, page_size, *shape), dtype)
            for name, shape in group.streams
        }
        for group, pages in zip(layout.groups, num_pages, strict=True)
    )


def copy_page(pages: Pages, source: Int32[Array, " G"], target: Int32[Array, " G"]) -> Pages:
    """Copy page source[g] to target[g] in every group (0 -> 0 where nothing is copied)."""
    return tuple(
        {name: array.at[:, target[g]].set(array[:, source[g]]) for name, array in group.items()}
        for g, group in enumerate(pages)
    )


def slots_of(
    table: Int32[Array, "B MP"],
    request: Int32[Array, " T"],
    position: Int32[Array, " T"],
    write: Bool[Array, " T"],
    page_size: int,
) -> Int32[Array, " T"]:
    """Where each row's entry lies in a layer's pages (page * page_size + offset); -1 where `write`
    does not allow it."""
    column = jnp.clip(position // page_size, 0, table.shape[1] - 1)
    return jnp.where(write, table[request, column] * page_size + position % page_size, -1)
