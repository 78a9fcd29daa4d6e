"""The layer of a stacked cache, as a number and as a traced index; other layers are NaN."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.cases import check, make_batch

from pallas_kernels.ragged_paged_attention import ragged_paged_attention

SMALL = ((18, 70), (1, 40))


@pytest.mark.parametrize("layer", [0, 2])
def test_layers(layer: int) -> None:
    """`check` passes the layer as a traced argument."""
    check(make_batch(SMALL, layers=3, layer=layer, num_rows=20, positions=80))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_static_layer_equals_a_traced_one(implementation: str) -> None:
    batch = make_batch(SMALL, layers=3, layer=1, num_rows=20, positions=80)

    def call(layer: int | jax.Array) -> jax.Array:
        return ragged_paged_attention(
            jnp.asarray(batch.q),
            jnp.asarray(batch.k_pages),
            jnp.asarray(batch.v_pages),
            layer,
            jnp.asarray(batch.page_table),
            jnp.asarray(batch.cu_q_lens),
            jnp.asarray(batch.kv_lens),
            scale=0.25,
            implementation=implementation,
        )

    static, traced = jax.jit(lambda: call(1))(), jax.jit(call)(jnp.int32(1))
    assert np.isfinite(static).all()
    np.testing.assert_allclose(static, traced, rtol=0, atol=1e-6)
