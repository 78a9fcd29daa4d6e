"""The work list of the kernel: which rows of which request each tile computes.

The query rows of a key head are numbered token by token, `group` of them per token; a tile holds
`block_m` consecutive rows of one request, whatever the group.
"""

from __future__ import annotations

from enum import IntEnum

import jax.numpy as jnp
from jaxtyping import Array, Int32


class Column(IntEnum):
    """What a tile's entry says. Padding rows form one request of their own that sees no key."""

    REQUEST = 0
    FIRST_TOKEN = 1  # the request's first query row in q
    NUM_ROWS = 2  # the request's rows, group times its query rows
    FIRST_ROW = 3  # of the tile, among the request's rows; NUM_ROWS or more: nothing to do
    POSITION = 4  # of the request's first query row
    NUM_KEYS = 5  # 0 for padding rows


# A power of two, so that an entry lies within one cache line.
ENTRY_SIZE = 8


def num_tiles(num_tokens: int, num_requests: int, group: int, block_m: int) -> int:
    """The most tiles a batch can need: one part-filled tile for each request and the padding."""
    return num_tokens * group // block_m + num_requests + 1


def make_tiles(
    kv_lens: Int32[Array, " B"],
    cu_q_lens: Int32[Array, "B+1"],
    *,
    num_tokens: int,
    group: int,
    block_m: int,
) -> Int32[Array, "K 8"]:
    """One entry per tile; every row of q belongs to exactly one tile."""
    num_requests = kv_lens.shape[0]
    start = cu_q_lens.astype(jnp.int32)
    end = jnp.concatenate([start[1:], jnp.full(1, num_tokens, jnp.int32)])
    keys = jnp.concatenate([kv_lens.astype(jnp.int32), jnp.zeros(1, jnp.int32)])
    rows = (end - start) * group
    tiles = (rows + block_m - 1) // block_m
    last = jnp.cumsum(tiles, dtype=jnp.int32)
    tile = jnp.arange(num_tiles(num_tokens, num_requests, group, block_m), dtype=jnp.int32)
    owner = jnp.searchsorted(last, tile, side="right", method="compare_all").astype(jnp.int32)
    owner = jnp.minimum(owner, num_requests)  # past the last tile: beyond its owner's rows
    entry = {
        Column.REQUEST: jnp.minimum(owner, num_requests - 1),
        Column.FIRST_TOKEN: start[owner],
        Column.NUM_ROWS: rows[owner],
        Column.FIRST_ROW: (tile - (last[owner] - tiles[owner])) * block_m,
        Column.POSITION: keys[owner] - (end - start)[owner],
        Column.NUM_KEYS: keys[owner],
    }
    columns = [entry[column] for column in Column]
    padding = [jnp.zeros_like(tile)] * (ENTRY_SIZE - len(columns))
    return jnp.stack(columns + padding, axis=1)
