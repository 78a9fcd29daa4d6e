"""What training takes in place of kernels: the same values, with derivatives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from kernels.cases import TOLERANCE, assert_close, attend, make_batch

from pallas_kernels._implementations import differentiable
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.ragged_paged_attention import api

# Requests of equally many rows, at different places of their texts.
EQUAL = ((16, 40), (16, 16), (16, 64))
RELATIVE = {
    "rel_rows": np.random.default_rng(1).standard_normal((48, 4, 3)).astype(np.float32),
    "rel_table": np.random.default_rng(2).standard_normal((3, 24)).astype(np.float32),
}
SINKS = np.linspace(-1, 1, 4, dtype=np.float32)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 9},
        {"softcap": 1.5, "sinks": SINKS},
        {"window": 20, "sinks": SINKS, **RELATIVE},
    ],
    ids=["plain", "window", "softcap", "all"],
)
def test_attention_of_equally_many_rows(options: dict[str, Any], dtype: str) -> None:
    batch = make_batch(EQUAL, window=options.get("window")).cast(dtype)
    found = attend(batch, "differentiable", scale=0.25, **options)
    assert_close(found, attend(batch, "reference", scale=0.25, **options), TOLERANCE[dtype])


def test_attention_has_derivatives() -> None:
    batch = make_batch(((4, 8), (4, 4)), num_rows=8, positions=16, page=4)
    arrays = [np.nan_to_num(array) for array in (batch.q, batch.k_pages, batch.v_pages)]

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return api.ragged_paged_attention(
            q,
            k,
            v,
            0,
            jnp.asarray(batch.page_table),
            jnp.asarray(batch.cu_q_lens),
            jnp.asarray(batch.kv_lens),
            scale=0.25,
            window=5,
            sinks=jnp.asarray(SINKS),
            implementation="differentiable",
        )

    check_grads(jax.jit(attention), arrays, order=1, modes=["rev"], atol=2e-2, rtol=2e-2)


def test_unequal_rows_are_refused() -> None:
    batch = make_batch(((3, 3), (2, 2), (1, 1)), num_rows=7)
    with pytest.raises(ValueError, match="equally many for each of 3 requests, got 7"):
        attend(batch, "differentiable", scale=0.25)


def test_they_are_chosen_within_the_context_only() -> None:
    rows, matrices = np.ones((4, 3), np.float32), np.ones((2, 3, 5), np.float32)
    sizes = np.array([1, 3])

    def total(rows: jax.Array, sizes: jax.Array) -> jax.Array:
        return jnp.sum(grouped_matmul(rows, jnp.asarray(matrices), sizes))

    with differentiable():
        slope = jax.grad(total)(jnp.asarray(rows), jnp.asarray(sizes))
    np.testing.assert_array_equal(slope, np.full((4, 3), 5.0))
    # A loop whose length depends on the sizes has none, once they are not known in advance.
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.jit(jax.grad(total))(jnp.asarray(rows), jnp.asarray(sizes))
