"""XLA implementation on fixed tiles: 16 query rows of one request against key blocks of 64.

The tile shape never depends on the batch, the chunking or the window width, and a key block that a
row cannot see changes none of its bits (its weight is an exact zero, its rescaling an exact one).
On a CPU in float32 every row therefore comes out bit-identical in any schedule, which the engine's
exactness tests rely on.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

Q_TILE = 16
KV_TILE = 64


def _tiles(cu_q_lens: Array, num_tiles: int) -> tuple[Array, Array]:
    """Work list: the request of each tile and the tile's first row; unused tiles start past the
    end.
    """
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    ends = jnp.cumsum((q_lens + Q_TILE - 1) // Q_TILE)
    tile = jnp.arange(num_tiles)
    request = jnp.searchsorted(ends, tile, side="right", method="compare_all")
    used = tile < ends[-1]
    request = jnp.where(used, request, q_lens.shape[0] - 1)
    before = jnp.where(request > 0, ends[jnp.maximum(request - 1, 0)], 0)
    first = cu_q_lens[request] + (tile - before) * Q_TILE
    return request, jnp.where(used, first, cu_q_lens[-1])


def ragged_paged_attention(
    q: Float[Array, "T Hq D"],
    k_pages: Float[Array, "L P page Hkv D"],
    v_pages: Float[Array, "L P page Hkv Dv"] | None,
    layer: int | Int[Array, ""],
    page_table: Int32[Array, "B MP"],
    cu_q_lens: Int32[Array, "B+1"],
    kv_lens: Int32[Array, " B"],
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Float[Array, " Hq"] | None,
    rel_rows: Float[Array, "T Hq d_rel"] | None,
    rel_table: Float[Array, "d_rel E"] | None,
    value_dim: int | None,
) -> Float[Array, "T Hq Dv"]:
    """See `api.ragged_paged_attention`."""
    num_rows, num_heads = q.shape[:2]
    page, num_kv_heads = k_pages.shape[2:4]
    group = num_heads // num_kv_heads
    num_requests, table_width = page_table.shape
    num_tiles = -(-num_rows // Q_TILE) + num_requests
    value_size = value_dim if v_pages is None else v_pages.shape[4]

    request, first_row = _tiles(cu_q_lens, num_tiles)
    row = first_row[:, None] + jnp.arange(Q_TILE)  # [tiles, 16]
    real = row < cu_q_lens[request + 1][:, None]
    position = (kv_lens - cu_q_lens[1:])[request][:, None] + row
    position = jnp.where(real, position, -1)

    def tiled(rows: Array) -> Array:
        """[T, Hq, X] -> [tiles, Hkv, 16 * group, X]; rows outside a tile are zero."""
        by_tile = rows.at[jnp.where(real, row, num_rows)].get(mode="fill", fill_value=0)
        by_tile = by_tile.reshape(num_tiles, Q_TILE, num_kv_heads, group, rows.shape[2])
        return by_tile.swapaxes(1, 2).reshape(num_tiles, num_kv_heads, Q_TILE * group, -1)

    queries = tiled(q)
    by_distance = None
    if rel_rows is not None and rel_table is not None:
        by_distance = jnp.einsum("khqr,re->khqe", tiled(rel_rows), rel_table.astype(rel_rows.dtype))
        by_distance = by_distance.astype(jnp.float32)

    # Keys outside [oldest, newest] of a tile are seen by none of its rows and may be NaN.
    newest = jnp.max(position, axis=1)
    oldest = jnp.zeros_like(newest)
    if window is not None:
        lowest = jnp.min(jnp.where(real, position, jnp.iinfo(jnp.int32).max), axis=1)
        oldest = jnp.maximum(lowest - window + 1, 0)
    row_position = jnp.repeat(position, group, axis=1)[:, None, :, None]  # [tiles, 1, 16*group, 1]

    def attend(block: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry
        span = block * KV_TILE + jnp.arange(KV_TILE)
        pages = page_table[request][:, jnp.minimum(span // page, table_width - 1)]  # [tiles, 64]
        keys = k_pages[layer, pages, span % page]  # [tiles, 64, Hkv, D]
        values = keys[..., :value_dim] if v_pages is None else v_pages[layer, pages, span % page]
        values = values.astype(jnp.float32)
        seen = (span >= oldest[:, None]) & (span <= newest[:, None])
        values = jnp.where(seen[:, :, None, None], values, 0.0)

        scores = jnp.einsum("khqd,kshd->khqs", queries, keys, preferred_element_type=jnp.float32)
        scores *= scale
        distance = row_position - span
        if by_distance is not None:
            extent = by_distance.shape[3]
            index = jnp.broadcast_to(jnp.clip(distance, 0, extent - 1), scores.shape)
            bias = jnp.take_along_axis(by_distance, index, axis=3)
            scores += jnp.where(distance < extent, bias, 0.0)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        visible = distance >= 0
        if window is not None:
            visible &= distance < window
        scores = jnp.where(visible, scores, -jnp.inf)

        new_top = jnp.maximum(top, jnp.max(scores, axis=3, keepdims=True))
        shift = jnp.where(jnp.isfinite(new_top), new_top, 0.0)
        weights = jnp.exp(scores - shift)
        rescale = jnp.exp(top - shift)
        total = total * rescale + jnp.sum(weights, axis=3, keepdims=True)
        acc = acc * rescale + jnp.einsum("khqs,kshd->khqd", weights, values)
        return new_top, total, acc

    shape = (num_tiles, num_kv_heads, Q_TILE * group)
    start = (
        jnp.full((*shape, 1), -jnp.inf, jnp.float32),
        jnp.zeros((*shape, 1), jnp.float32),
        jnp.zeros((*shape, value_size), jnp.float32),
    )
    first_block = jnp.min(jnp.where(newest >= 0, oldest, jnp.iinfo(jnp.int32).max)) // KV_TILE
    last_block = jnp.max(newest) // KV_TILE
    top, total, acc = jax.lax.fori_loop(first_block, last_block + 1, attend, start)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, num_kv_heads, 1, group)
        sink = jnp.broadcast_to(sink, (1, num_kv_heads, Q_TILE, group)).reshape(
            1, num_kv_heads, -1, 1
        )
        new_top = jnp.maximum(top, sink)
        rescale = jnp.exp(top - new_top)
        total = total * rescale + jnp.exp(sink - new_top)
        acc = acc * rescale
    out = acc / jnp.where(total > 0, total, 1.0)

    # Back to ragged rows: row t is row (t - first row of its tile) of its tile.
    out = out.reshape(num_tiles, num_kv_heads, Q_TILE, group, -1).swapaxes(1, 2)
    out = out.reshape(num_tiles * Q_TILE, num_heads, -1).astype(q.dtype)
    target = jnp.where(real, row, num_rows).reshape(-1)
    zeros = jnp.zeros((num_rows, num_heads, out.shape[2]), q.dtype)
    return zeros.at[target].set(out, mode="drop", unique_indices=False)
