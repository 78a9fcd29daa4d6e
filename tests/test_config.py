"""Configuration values of the wrong type are refused by name, whatever class they belong to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mmtp_jax.config import CacheConfig, ConfigError, EngineConfig, SpeculativeConfig
from mmtp_jax.specs import AttentionSpec, ModelConfig, MTPConfig, RopeConfig

INFINITE = float("inf")


@pytest.mark.parametrize(
    ("make", "name", "value", "kind"),
    [
        (CacheConfig, "page_size", "16", "an integer"),
        (CacheConfig, "page_size", 2.5, "an integer"),
        (CacheConfig, "page_size", True, "an integer"),
        (CacheConfig, "num_pages", 9.0, "an integer or None"),
        (CacheConfig, "memory_fraction", "all", "a finite number"),
        (CacheConfig, "memory_fraction", None, "a finite number"),
        (CacheConfig, "memory_fraction", float("nan"), "a finite number"),
        (CacheConfig, "enable_prefix_caching", "no", "true or false"),
        (EngineConfig, "model", None, "a string"),
        (EngineConfig, "dtype", np.float32, "a string"),
        (EngineConfig, "max_num_seqs", "8", "an integer or None"),
        (EngineConfig, "row_multiple", None, "an integer"),
        (EngineConfig, "max_model_len", "64", "an integer or None"),
        (EngineConfig, "speculative", "mtp", "SpeculativeConfig"),
        (EngineConfig, "load_format", [], "'auto' or 'dummy'"),
        (EngineConfig, "hf_overrides", [], "dict"),
        (EngineConfig, "tensor_parallel_size", "2", "an integer"),
        (SpeculativeConfig, "num_speculative_tokens", True, "an integer or 'auto' or None"),
        (SpeculativeConfig, "num_speculative_tokens", "3", "an integer or 'auto' or None"),
        (SpeculativeConfig, "method", ["mtp"], "'mtp' or null"),
    ],
)
def test_wrong_types_are_named(make: Callable[..., Any], name: str, value: Any, kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**{name: value})
    assert str(caught.value) == f"{name} must be {kind}, got {value!r}"


def test_descriptions_of_models_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="theta must be a finite number, got inf"):
        RopeConfig(8, theta=INFINITE)
    with pytest.raises(ConfigError, match=r"low_freq_factor \(4.0\) must be .* high_freq_factor"):
        RopeConfig(8, scaling="llama3", low_freq_factor=4.0, high_freq_factor=4.0)
    with pytest.raises(ConfigError, match=r"head_dim must be an integer, got 8\.0"):
        AttentionSpec(4, 2, 8.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"num_heads \(3\) must be a multiple of num_kv_heads"):
        AttentionSpec(3, 2, 8)
    with pytest.raises(ConfigError, match="an MTP configuration needs at least one module"):
        MTPConfig(())
    layer: Any = "layer"
    with pytest.raises(ConfigError, match="layers must be tuple, got"):
        ModelConfig("llama", 64, 32, (layer,), 512)


def test_numbers_of_numpy_become_plain() -> None:
    config = EngineConfig(max_model_len=np.int32(64), cache=CacheConfig(page_size=np.int64(4)))  # type: ignore[arg-type]
    assert type(config.max_model_len) is int and type(config.cache.page_size) is int
    assert type(CacheConfig(memory_fraction=np.float32(0.5)).memory_fraction) is float  # type: ignore[arg-type]
    assert type(CacheConfig(memory_fraction=1).memory_fraction) is float


def test_positions_of_a_cache_fit_its_indices() -> None:
    CacheConfig(num_pages=2**27 - 1)
    with pytest.raises(ConfigError, match=r"num_pages \* page_size must be < 2\*\*31"):
        CacheConfig(num_pages=2**27)
