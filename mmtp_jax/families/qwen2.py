"""Qwen2 and Qwen2.5 (arXiv 2407.10671): biases on q, k and v."""

from __future__ import annotations

from mmtp_jax.families import tensors
from mmtp_jax.families.blocks import dense_attention, dense_layers, finished
from mmtp_jax.families.family import Family
from mmtp_jax.families.settings import Settings
from mmtp_jax.specs import ModelConfig


def parse(settings: Settings) -> ModelConfig:
    settings.only("attention_bias", True)
    settings.only("num_nextn_predict_layers", 0)
    settings.only("use_mrope", False)
    attention = dense_attention(settings, qkv_bias=True)
    return finished(settings, "qwen2", dense_layers(settings, attention))


FAMILY = Family("qwen2", ("Qwen2ForCausalLM",), parse, tensors.trunk)
