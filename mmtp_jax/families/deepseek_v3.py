"""DeepSeek-V3 and R1 (arXiv 2412.19437): latent attention, and MTP modules after the last layer.

A module takes the normed hidden state and chains its own normed output; its layer is a mixture. The
released checkpoints have one module.
"""

from __future__ import annotations

from mmtp_jax.families import tensors
from mmtp_jax.families.blocks import rope_of
from mmtp_jax.families.family import Family
from mmtp_jax.families.mixtures import mixture_model, read_mixture
from mmtp_jax.families.rope import read_rope
from mmtp_jax.families.settings import Settings
from mmtp_jax.families.tensors import Sources
from mmtp_jax.specs import LatentAttentionSpec, ModelConfig


def parse(settings: Settings) -> ModelConfig:
    settings.only("hidden_act", "silu")
    # Without meaning for latent attention: one key for all heads, and sizes that other keys give.
    settings.ignore("num_key_value_heads", "head_dim", "qk_head_dim")
    mixture = read_mixture(settings)
    return mixture_model(settings, "deepseek_v3", _attention(settings), mixture)


def _attention(settings: Settings) -> LatentAttentionSpec:
    scaling = read_rope(settings)
    nope, rotated = settings.integer("qk_nope_head_dim"), settings.integer("qk_rope_head_dim")
    if rotated < 1 or nope < 1:
        raise settings.error("qk_nope_head_dim and qk_rope_head_dim must be >= 1")
    interleaved = settings.flag("rope_interleave", True)
    return LatentAttentionSpec(
        num_heads=settings.integer("num_attention_heads"),
        latent_rank=settings.integer("kv_lora_rank"),
        nope_dim=nope,
        value_dim=settings.integer("v_head_dim"),
        rope=rope_of(scaling, rotated, interleaved=interleaved),
        scale=(nope + rotated) ** -0.5 * scaling.logit_factor(),
        query_rank=settings.integer("q_lora_rank", None),
        bias=settings.flag("attention_bias", False),
    )


def sources(config: ModelConfig) -> Sources:
    return tensors.trunk(config) | tensors.deepseek_modules(config)


FAMILY = Family("deepseek_v3", ("DeepseekV3ForCausalLM",), parse, sources, tensors.deepseek_copies)
