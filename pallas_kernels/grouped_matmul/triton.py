"""Triton-lowered Pallas kernel: one program per block of a group's rows and strip of columns.

A block holds rows of one group only, so a group's rows are rounded up to whole blocks. How many
blocks there are is known on the device; the grid covers the most there can be (one part-filled
block per group), and programs without a block end at once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import compiler_params, dot, interpreted, load, store


@dataclass(frozen=True)
class Config:
    """Rows of a block, columns of a strip, entries summed up at a time, and how it is compiled."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def config_for(num_rows: int, num_groups: int, itemsize: int) -> Config:
    """A block has about as many rows as a group on average, but at least 16, the fewest that a
    matrix unit takes. Exact products of float32 need none, and registers for all they multiply."""
    if itemsize > 2:
        return Config(16, 64, 32, num_warps=8, num_stages=2)
    mean = -(-num_rows // num_groups)
    if mean > 64:
        return Config(128, 128, 64, num_warps=8, num_stages=3)
    if mean > 16:
        return Config(64, 128, 64, num_warps=4, num_stages=3)
    return Config(16, 64, 64, num_warps=4, num_stages=3)


def _kernel(
    rows_ref: Any,
    matrices_ref: Any,
    group_ref: Any,
    first_ref: Any,
    last_ref: Any,
    out_ref: Any,
    *,
    config: Config,
) -> None:
    num_rows, inner = rows_ref.shape
    columns = matrices_ref.shape[2]
    block, strip = pl.program_id(0), pl.program_id(1)
    group, first, last = group_ref[block], first_ref[block], last_ref[block]

    @pl.when(first < last)
    def multiply() -> None:
        row = first + jnp.arange(config.block_m)
        row = jnp.where(row < last, row, num_rows)
        column = strip * config.block_n + jnp.arange(config.block_n)
        real_row, real_column = (row < num_rows)[:, None], (column < columns)[None, :]

        def add(step: Array, total: Array) -> Array:
            k = step * config.block_k + jnp.arange(config.block_k)
            real = k < inner
            left = load(
                rows_ref.at[row[:, None], k[None, :]], mask=real_row & real[None, :], other=0
            )
            right = load(
                matrices_ref.at[group, k[:, None], column[None, :]],
                mask=real[:, None] & real_column,
                other=0,
            )
            return total + dot(left, right, allow_tf32=False)

        zeros = jnp.zeros((config.block_m, config.block_n), jnp.float32)
        total = jax.lax.fori_loop(0, pl.cdiv(inner, config.block_k), add, zeros)
        target = out_ref.at[row[:, None], column[None, :]]
        store(target, total.astype(out_ref.dtype), mask=real_row & real_column)


def grouped_matmul(
    rows: Float[Array, "M K"],
    matrices: Float[Array, "E K N"],
    sizes: Int[Array, " E"],
    config: Config | None = None,
) -> Float[Array, "M N"]:
    """See `api.grouped_matmul`. Interpreted on a CPU."""
    num_rows, num_groups, columns = rows.shape[0], *matrices.shape[::2]
    if config is None:
        config = config_for(num_rows, num_groups, rows.dtype.itemsize)
    block_m = config.block_m
    blocks = (sizes + block_m - 1) // block_m  # of each group
    last_block, last_row = jnp.cumsum(blocks), jnp.cumsum(sizes)
    block = jnp.arange(-(-num_rows // block_m) + min(num_groups, num_rows))
    group = jnp.searchsorted(last_block, block, side="right", method="compare_all")
    real = group < num_groups
    group = jnp.where(real, group, 0)
    within = block - (last_block[group] - blocks[group])
    first = last_row[group] - sizes[group] + within * block_m
    last = jnp.where(real, last_row[group], 0)
    y = pl.pallas_call(
        functools.partial(_kernel, config=config),
        out_shape=jax.ShapeDtypeStruct((num_rows, columns), rows.dtype),
        grid=(block.shape[0], pl.cdiv(columns, config.block_n)),
        compiler_params=compiler_params(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpreted(),
        name="grouped_matmul",
    )(rows, matrices, *(x.astype(jnp.int32) for x in (group, first, last)))
    return jnp.where((jnp.arange(num_rows) < last_row[-1])[:, None], y, 0)
