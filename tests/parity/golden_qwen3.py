"""Qwen3: a norm of every head of queries and keys before the rotation, wide heads, no biases.

Oracle: Qwen3ForCausalLM.
"""

from __future__ import annotations

from typing import Any

from golden import Golden
from hf_oracle import build_trunk

# Qwen3-8B.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 93,
    "eos_token_id": 95,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "max_window_layers": 3,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 96,
}


def build() -> list[Golden]:
    return [build_trunk("qwen3", CONFIG, {})]
