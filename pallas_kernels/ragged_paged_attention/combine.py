"""The second kernel of many parts: adds up what the first one kept of each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int32

from pallas_kernels._compat import compiler_params, interpreted
from pallas_kernels.ragged_paged_attention.program import Keys, Sums, Task, Tile, finish
from pallas_kernels.ragged_paged_attention.tiles import Column

# Rows of a program: few, so that all parts of them are loaded at once and many programs share them.
_ROWS = 4


def combine(
    out: Float[Array, "T Hq Dv"],
    values: Float[Array, "K Hkv S rows span"],
    stats: Float[Array, "K Hkv S 2 rows"],
    tiles: Int32[Array, "K 8"],
    sinks: Float[Array, " Hq"] | None,
    task: Task,
) -> Float[Array, "T Hq Dv"]:
    """`out`, in place, with the rows of all tiles whose keys were cut into several parts."""
    num_kv_heads = values.shape[1]
    group = out.shape[1] // num_kv_heads

    def kernel(*refs: Any) -> None:
        _, values_ref, stats_ref, tiles_ref, *sinks_ref, out_ref = refs
        index, head, block = pl.program_id(0), pl.program_id(1), pl.program_id(2)

        def entry(column: Column) -> Array:
            return tiles_ref[index, column]

        keys = Keys.of(entry, task, group)
        first = entry(Column.FIRST_ROW) + block * _ROWS

        @pl.when((first < entry(Column.NUM_ROWS)) & (keys.num_parts > 1))
        def add() -> None:
            row = block * _ROWS + jnp.arange(_ROWS)
            tile = Tile.of(entry, head, row, group)
            kept = Sums(values_ref, stats_ref, (index, head), row, tile.real)
            sums = kept.added(keys.num_parts)
            finish(tile, out_ref, sinks_ref[0] if sinks_ref else None, task, keys, sums)

    arrays = [out, values, stats, tiles, *([] if sinks is None else [sinks])]
    combined: Array = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        grid=(tiles.shape[0], num_kv_heads, task.config.block_m // _ROWS),
        input_output_aliases={0: 0},
        compiler_params=compiler_params(num_warps=4, num_stages=1),
        interpret=interpreted(),
        name="ragged_paged_attention_combine",
    )(*arrays)
    return combined
