"""Qwen3 dense models (arXiv 2505.09388): norms on queries and keys."""

from __future__ import annotations

from mmtp_jax.families import tensors
from mmtp_jax.families.blocks import dense_attention, dense_layers, finished
from mmtp_jax.families.family import Family
from mmtp_jax.families.settings import Settings
from mmtp_jax.specs import ModelConfig


def parse(settings: Settings) -> ModelConfig:
    bias = settings.flag("attention_bias", False)
    settings.only("num_nextn_predict_layers", 0)
    attention = dense_attention(
        settings, qkv_bias=bias, head_dim=128, output_bias=bias, qk_norm=True
    )
    return finished(settings, "qwen3", dense_layers(settings, attention))


FAMILY = Family("qwen3", ("Qwen3ForCausalLM",), parse, tensors.trunk)
