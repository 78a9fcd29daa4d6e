"""XLA implementation: a loop over blocks of 16 rows of one group.

`jax.lax.ragged_dot` expands the rows by the number of groups on a CPU and on a GPU, which 256
experts do not allow. Here only groups that have rows are touched, and a row's bits do not depend on
the others, because every block is the same small product.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK = 16


def grouped_matmul(
    rows: Float[Array, "M K"], matrices: Float[Array, "E K N"], sizes: Int[Array, " E"]
) -> Float[Array, "M N"]:
    """See `api.grouped_matmul`."""
    num_rows = rows.shape[0]
    blocks = (sizes + BLOCK - 1) // BLOCK  # of each group
    last_block, last_row = jnp.cumsum(blocks), jnp.cumsum(sizes)

    def multiply(block: Array, out: Array) -> Array:
        group = jnp.searchsorted(last_block, block, side="right", method="compare_all")
        within = block - (last_block[group] - blocks[group])
        row = last_row[group] - sizes[group] + within * BLOCK + jnp.arange(BLOCK)
        row = jnp.where(row < last_row[group], row, num_rows)
        part = rows.at[row].get(mode="fill", fill_value=0)
        y = jnp.dot(part, matrices[group], preferred_element_type=jnp.float32)
        return out.at[row].set(y.astype(out.dtype), mode="drop")

    zeros = jnp.zeros((num_rows, matrices.shape[2]), rows.dtype)
    return jax.lax.fori_loop(0, last_block[-1], multiply, zeros)
