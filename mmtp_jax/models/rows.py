"""Ragged rows: which request and position each of the T rows of one forward pass stands for."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows packed request after request; rows past `cu_q_lens[-1]` are padding.

    `tables` holds, per cache group, the page tables of the B requests of this step.
    """

    request: Int32[Array, " T"]
    position: Int32[Array, " T"]
    real: Bool[Array, " T"]
    cu_q_lens: Int32[Array, " B+1"]
    kv_lens: Int32[Array, " B"]
    tables: tuple[Int32[Array, "B MP"], ...]


def pack_rows(
    start: Int32[Array, " B"],
    count: Int32[Array, " B"],
    tables: tuple[Int32[Array, "B MP"], ...],
    num_rows: int,
) -> Rows:
    """Rows `start[b] .. start[b] + count[b] - 1` of every request; sum(count) must be <=
    num_rows.
    """
    cu_q_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(count, dtype=jnp.int32)])
    row = jnp.arange(num_rows, dtype=jnp.int32)
    request = jnp.searchsorted(cu_q_lens[1:], row, side="right", method="compare_all")
    real = row < cu_q_lens[-1]
    request = jnp.where(real, request, 0).astype(jnp.int32)
    position = jnp.where(real, start[request] + row - cu_q_lens[request], 0)
    return Rows(request, position, real, cu_q_lens, start + count, tables)
