"""The plain float32 statement of the function: every row's matrix gathered.

Memory grows with M * K * N: for tests on small inputs.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def grouped_matmul(
    rows: Float[Array, "M K"], matrices: Float[Array, "E K N"], sizes: Int[Array, " E"]
) -> Float[Array, "M N"]:
    """See `api.grouped_matmul`."""
    row = jnp.arange(rows.shape[0])
    group = jnp.searchsorted(jnp.cumsum(sizes), row, side="right")
    real = group < matrices.shape[0]
    chosen = matrices[jnp.where(real, group, 0)].astype(jnp.float32)
    wide = jnp.where(real[:, None], rows.astype(jnp.float32), 0.0)
    y = jnp.einsum("mk,mkn->mn", wide, jnp.where(real[:, None, None], chosen, 0.0))
    return y.astype(rows.dtype)
