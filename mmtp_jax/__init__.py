"""Multi-module MTP speculative decoding in JAX: `LLM`, `SamplingParams` and the configuration."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmtp_jax.config import CacheConfig, ConfigError, EngineConfig, SpeculativeConfig
    from mmtp_jax.llm import LLM
    from mmtp_jax.outputs import CompletionOutput, RequestOutput
    from mmtp_jax.sampling.params import SamplingParams
    from mmtp_jax.sampling.structured import StructuredOutputs
    from mmtp_jax.weights.errors import ModelError

__version__ = "0.1.0"

_HOMES = {
    "LLM": "llm",
    "SamplingParams": "sampling.params",
    "StructuredOutputs": "sampling.structured",
    "EngineConfig": "config",
    "CacheConfig": "config",
    "SpeculativeConfig": "config",
    "ConfigError": "config",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "ModelError": "weights.errors",
}
__all__ = [
    "LLM",
    "CacheConfig",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "ModelError",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "StructuredOutputs",
]


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that host-only modules never pull in jax."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
