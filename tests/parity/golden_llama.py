"""Llama: Llama 3.1's rotary scaling with its own head, and a tied model without scaling.

The scaled frequencies cover all three cases of the Llama 3.1 model card: of the eight wavelengths
the first stays, the second is blended, and the others are stretched. Oracle: LlamaForCausalLM.
"""

from __future__ import annotations

from typing import Any

from golden import Golden
from hf_oracle import build_trunk

# Llama-3.1-8B.
SCALED: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 94,
    "eos_token_id": [91, 92, 93],
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "head_dim": 16,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 96,
}

# SmolLM2-135M-Instruct.
TIED: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 48,
    "is_llama_config": True,
    "max_position_embeddings": 512,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 96,
}


def build() -> list[Golden]:
    return [
        build_trunk("llama", SCALED, {}),
        # The embedding is the head too: it sets the scale of the logits.
        build_trunk("llama_tied", TIED, {"embed_tokens": 4.0, "down_proj": 1.5}),
    ]
