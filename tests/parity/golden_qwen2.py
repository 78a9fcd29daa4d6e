"""Qwen2: biases of q, k and v, and a sliding window in the upper layers.

Layers from `max_window_layers` on see `sliding_window` keys including their own. Oracle:
Qwen2ForCausalLM.
"""

from __future__ import annotations

from typing import Any

from golden import Golden
from hf_oracle import build_trunk

# Qwen2-7B-Instruct, whose windows are not in use.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 93,
    "eos_token_id": 95,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "max_window_layers": 2,
    "model_type": "qwen2",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.41.2",
    "use_cache": True,
    "use_sliding_window": True,
    "vocab_size": 96,
}


def build() -> list[Golden]:
    return [build_trunk("qwen2", CONFIG, {})]
