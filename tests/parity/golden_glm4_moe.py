"""GLM-4.5 with two modules: half of each head rotated, a norm of queries and keys, sigmoid router.

What transformers 5.24.0 computes where descriptions differ:

- `attention_bias` gives biases to q, k and v, never to o. The norms of queries and keys
  (`use_qk_norm`, with the 355B model) are per head, with `rms_norm_eps`, before the rotation.
- The first int(head_dim * partial_rotary_factor) dimensions of a head are rotated, as two halves;
  the frequencies are those of a head of that size. Without the key the factor is 0.5.
- The router is that of DeepSeek-V3 (see golden_deepseek_v3.py), with one group in the releases.
- Modules are wired as DeepSeek-V3's: MoE layers, fed after the final norm, chained after
  `shared_head.norm`, no embedding zeroed.

Oracle: Glm4MoeForCausalLM and its MtpModel, which is told the module's layer numbers.
"""

from __future__ import annotations

from typing import Any

from golden import Golden
from hf_oracle import build_with_modules

CONFIG: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "pad_token_id": 91,
    "eos_token_id": [91, 93, 95],
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "partial_rotary_factor": 0.5,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 2,
    "rms_norm_eps": 1e-4,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0",
    "use_cache": True,
    "use_qk_norm": True,
    "vocab_size": 96,
}

SCALES = {
    "embed_tokens": 5.0,  # tokens differ enough that together they choose every expert
    r"o_proj\.weight$": 0.5,
    r"mlp\.gate\.weight$": 2.0,
    "e_score_correction_bias": 0.3,
}


def build() -> list[Golden]:
    return [build_with_modules("glm4_moe", CONFIG, SCALES, {})]
