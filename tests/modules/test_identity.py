"""Which targets count as the one that modules were trained for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mmtp_jax.modules.identity import TargetIdentity, difference
from mmtp_jax.specs import (
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    ModelConfig,
    MoESpec,
    MTPConfig,
    RopeConfig,
)
from mmtp_jax.weights.errors import ModelError

ATTENTION = AttentionSpec(4, 2, 8, rope=RopeConfig(8))
LAYER = LayerSpec(ATTENTION, DenseSpec(48))
MODEL = ModelConfig("llama", 64, 32, (LAYER, LAYER), 512, eos_token_ids=(2,))
NORM = np.random.default_rng(0).normal(1, 0.3, 32).astype(np.float32)
IDENTITY = TargetIdentity(MODEL, NORM)


@pytest.mark.parametrize(
    "harmless",
    [
        {"family": "mimo"},
        {"max_position": 4096},
        {"bos_token_id": 1},
        {"eos_token_ids": (0, 2)},
        {"padded_vocab_size": 64},
        {"mtp": MTPConfig((LAYER,))},
        {"norm_eps": float(np.float32(1e-5))},
    ],
)
def test_what_may_differ(harmless: dict[str, Any]) -> None:
    IDENTITY.check_architecture(replace(MODEL, **harmless))


def changed(**fields: Any) -> dict[str, Any]:
    return {"layers": (LAYER, replace(LAYER, attention=replace(ATTENTION, **fields)))}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 2048}, "hidden_size 32, not 2048"),
        ({"vocab_size": 65}, "vocab_size 64, not 65"),
        ({"padded_vocab_size": 128}, "padded_vocab_size 64, not 128"),
        ({"norm_eps": 1e-6}, "norm_eps 1e-05, not 1e-06"),
        ({"tie_embeddings": True}, "tie_embeddings False, not True"),
        ({"layers": (LAYER,) * 3}, "2 layers, not 3"),
        (changed(num_kv_heads=1), "layers.1.attention.num_kv_heads 2, not 1"),
        (changed(window=16), "layers.1.attention.window None, not 16"),
        (changed(rope=None), "layers.1.attention.rope RopeConfig, not None"),
        (changed(rope=RopeConfig(8, 1e6)), "layers.1.attention.rope.theta 10000, not 1e+06"),
        (
            {"layers": (LAYER, LayerSpec(ATTENTION, MoESpec(4, 2, 8)))},
            "layers.1.mlp DenseSpec, not MoESpec",
        ),
    ],
)
def test_what_differs_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as error:
        IDENTITY.check_architecture(replace(MODEL, **change))
    assert str(error.value) == f"the modules were trained for another target: {words}"
    assert difference(MODEL, MODEL) is None


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_rounding_of_the_final_norm(dtype: type) -> None:
    for values in (NORM, NORM * 1e-3):
        TargetIdentity(MODEL, values).check_final_norm(values.astype(dtype))


def test_another_final_norm() -> None:
    other = NORM.copy()
    other[5] += 0.5
    with pytest.raises(ModelError, match=r"of this architecture: its final norm differs .* 0\.5"):
        IDENTITY.check_final_norm(other)
