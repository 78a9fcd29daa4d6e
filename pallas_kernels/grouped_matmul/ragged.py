"""jax's own grouped product, which has derivatives.

It expands the rows by the number of groups (an H200: 5.0 ms instead of 0.33 for 576 rows of 64
groups of 4096 x 2048), so it is for training only.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def grouped_matmul(
    rows: Float[Array, "M K"], matrices: Float[Array, "E K N"], sizes: Int[Array, " E"]
) -> Float[Array, "M N"]:
    """See `api.grouped_matmul`."""
    y = jax.lax.ragged_dot(
        rows, matrices, sizes.astype(jnp.int32), preferred_element_type=jnp.float32
    )
    real = jnp.arange(rows.shape[0]) < jnp.sum(sizes)
    return jnp.where(real[:, None], y, 0.0).astype(rows.dtype)
