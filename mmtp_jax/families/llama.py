"""Llama (and SmolLM2): Llama 3.1 model card."""

from __future__ import annotations

from mmtp_jax.families import tensors
from mmtp_jax.families.blocks import dense_attention, finished
from mmtp_jax.families.family import Family
from mmtp_jax.families.settings import Settings
from mmtp_jax.specs import DenseSpec, LayerSpec, ModelConfig


def parse(settings: Settings) -> ModelConfig:
    bias = settings.flag("attention_bias", False)
    attention = dense_attention(settings, qkv_bias=bias, output_bias=bias)
    settings.only("mlp_bias", False)
    settings.only("rope_interleaved", False)
    settings.only("sliding_window")
    settings.only("use_sliding_window", False)
    settings.only("num_nextn_predict_layers", 0)
    layer = LayerSpec(attention, DenseSpec(settings.integer("intermediate_size")))
    return finished(settings, "llama", (layer,) * settings.count("num_hidden_layers"))


FAMILY = Family("llama", ("LlamaForCausalLM",), parse, tensors.trunk)
