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

Streams = dict[str, jax.Array]  # stream name -> [L, P, page, ...] or values by row [T, ...]
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


def write_rows(
    arrays: Streams,
    values: Streams,
    layer: int | Int32[Array, ""],
    table: Int32[Array, "B MP"],
    request: Int32[Array, " T"],
    position: Int32[Array, " T"],
    write: Bool[Array, " T"],
) -> Streams:
    """Write one value per row into the streams in `values`, where `write` allows.

    The other rows get a page index past the pool, which scatter drops (a negative index would wrap
    around and be written even with mode="drop").
    """
    num_pages, page_size = next(iter(arrays.values())).shape[1:3]
    column = jnp.clip(position // page_size, 0, table.shape[1] - 1)
    page = jnp.where(write, table[request, column], num_pages)
    offset = position % page_size
    written = {
        name: arrays[name]
        .at[layer, page, offset]
        .set(value.astype(arrays[name].dtype), mode="drop")
        for name, value in values.items()
    }
    return arrays | written
