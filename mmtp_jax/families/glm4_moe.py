"""GLM-4.5 and GLM-4.5-Air (arXiv 2508.06471): partly rotated heads, DeepSeek's experts, modules."""

from __future__ import annotations

from mmtp_jax.families import tensors
from mmtp_jax.families.blocks import rope_of
from mmtp_jax.families.family import Family
from mmtp_jax.families.mixtures import mixture_model, read_mixture
from mmtp_jax.families.rope import read_rope
from mmtp_jax.families.settings import Settings
from mmtp_jax.families.tensors import Sources
from mmtp_jax.specs import AttentionSpec, ModelConfig


def parse(settings: Settings) -> ModelConfig:
    settings.only("hidden_act", "silu")
    mixture = read_mixture(settings, n_group=1, topk_group=1)
    return mixture_model(settings, "glm4_moe", _attention(settings), mixture)


def _attention(settings: Settings) -> AttentionSpec:
    heads = settings.integer("num_attention_heads")
    head_dim = settings.integer("head_dim", settings.integer("hidden_size") // max(heads, 1))
    scaling = read_rope(settings)
    factor = 0.5 if scaling.partial is None else scaling.partial
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=settings.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        rope=rope_of(scaling, int(head_dim * factor)),
        qkv_bias=settings.flag("attention_bias", False),
        qk_norm=settings.flag("use_qk_norm", False),
    )


def sources(config: ModelConfig) -> Sources:
    return tensors.trunk(config) | tensors.deepseek_modules(config)


FAMILY = Family("glm4_moe", ("Glm4MoeForCausalLM",), parse, sources, tensors.deepseek_copies)
