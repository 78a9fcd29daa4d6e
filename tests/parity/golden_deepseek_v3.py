"""DeepSeek-V3 with three modules: latent attention, yarn, experts chosen within groups.

What transformers 5.24.0 computes where descriptions differ:

- The norms of the latents (`q_a_layernorm`, `kv_a_layernorm`) have the epsilon 1e-6 whatever
  `rms_norm_eps` says, which is 1e-4 here to tell them apart (the release has 1e-6).
- The rotated pairs are (x[2i], x[2i+1]). The released config has no `rope_interleave` (the default
  is true), and in configs that transformers saves `head_dim` is the rotated part's size.
- yarn, with d rotated dimensions and f[i] = theta**(2i/d): the inverse frequencies are
  1/f * (1 - ramp) + 1/(factor * f) * ramp, ramp = clip((i - low) / (high - low), 0, 1),
  low = max(floor(c(beta_fast)), 0), high = min(ceil(c(beta_slow)), d - 1),
  c(r) = d * ln(original / (2 pi r)) / (2 ln theta).
  cos and sin are multiplied by m(mscale) / m(mscale_all_dim), the scores by m(mscale_all_dim)**2 on
  top of (nope + rope)**-0.5, with m(a) = 0.1 * a * ln(factor) + 1. Both mscale are 1.0 in the
  release, so that only the scores change there; here they differ. The ramp here is 0, 0, 1/3, 2/3.
- Router in float32: sigmoid of the logits; with the correction bias added, a group's score is the
  sum of its two best, experts outside the `topk_group` best groups are out of the race (-inf; some
  implementations write 0.0, which differs once a kept score plus bias is negative, as here), and
  the k best are chosen. Their weights are the sigmoids without bias, divided by (their sum +
  1e-20), times `routed_scaling_factor`.
- Modules are MoE layers whatever `first_k_dense_replace` says. Module 0 is fed the trunk's hidden
  state after its final norm, the others the output of the module before after its
  `shared_head.norm`. No embedding is zeroed.

The copies of embedding and head in every module are those of the release. Oracle:
DeepseekV3ForCausalLM and its MtpModel, which is told the module's layer numbers (it knows those of
the released sizes only).
"""

from __future__ import annotations

from typing import Any

from golden import Golden
from hf_oracle import build_with_modules

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "kv_lora_rank": 16,
    "max_position_embeddings": 1024,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 8,
    "moe_layer_freq": 1,
    "n_group": 4,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 3,
    "pretraining_tp": 1,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-4,
    "rope_scaling": {
        "beta_fast": 4,
        "beta_slow": 0.25,
        "factor": 8,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 128,
        "type": "yarn",
    },
    "rope_theta": 100,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 12,
    "vocab_size": 96,
}

SCALES = {
    "embed_tokens": 5.0,  # tokens differ enough that together they choose every expert
    r"o_proj\.weight$": 0.5,
    r"(q_a_proj|kv_a_proj_with_mqa)\.weight$": 0.1,  # small latents show their norms' epsilon
    r"mlp\.gate\.weight$": 2.0,
    "e_score_correction_bias": 0.3,
}
SHIFTS = {"e_score_correction_bias": -0.7}


def build() -> list[Golden]:
    return [build_with_modules("deepseek_v3", CONFIG, SCALES, SHIFTS)]
