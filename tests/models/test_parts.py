"""Numerics of shared parts against formulas written out in NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mmtp_jax.cache.layout import cache_layout
from mmtp_jax.models.parts import RMSNorm
from mmtp_jax.models.rows import pack_rows
from mmtp_jax.specs import AttentionSpec, DenseSpec, LayerSpec, ModelConfig


def layer(kv_heads: int = 2, window: int | None = None, conv_taps: int = 0) -> LayerSpec:
    return LayerSpec(AttentionSpec(4, kv_heads, 8, window=window), DenseSpec(8), conv_taps)


@pytest.mark.parametrize("style", ["plain", "one_plus"])
def test_rms_norm_is_float32_inside(style: str) -> None:
    config = ModelConfig("test", 8, 64, (layer(),), 16, norm_style=style)
    norm = RMSNorm(64, config)
    scale = np.random.default_rng(1).standard_normal(64).astype(np.float32)
    norm.scale = nnx.Param(jnp.asarray(scale, jnp.bfloat16))
    x = 300 * np.random.default_rng(2).standard_normal((3, 64))
    low = jnp.asarray(x, jnp.bfloat16)
    wide = np.asarray(low, np.float64)
    want = wide / np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + config.norm_eps)
    want *= np.asarray(norm.scale[...], np.float64) + (style == "one_plus")
    got = norm(low)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2e-2, atol=2e-2)


def test_rows_are_packed_request_after_request() -> None:
    rows = pack_rows(jnp.array([5, 0, 9]), jnp.array([2, 0, 3]), (), 8)
    assert rows.position[:5].tolist() == [5, 6, 9, 10, 11]
    assert rows.request[:5].tolist() == [0, 0, 2, 2, 2]
    assert rows.real.tolist() == [True] * 5 + [False] * 3
    assert rows.kv_lens.tolist() == [7, 0, 12]


def test_layers_share_a_group_only_if_window_and_shapes_agree() -> None:
    wide, narrow = layer(), layer(kv_heads=1)
    sliding, with_conv = layer(window=4), layer(conv_taps=4)
    layout = cache_layout(ModelConfig("t", 8, 16, (wide, narrow, sliding, with_conv, wide), 16))
    assert [place.attention for place in layout.target] == [(0, 0), (1, 0), (2, 0), (0, 1), (0, 2)]
    assert layout.target[3].conv == (3, 0)
    assert layout.groups[3].window == 4 and layout.groups[0].num_layers == 3
