"""MiMo-7B (arXiv 2505.07608): a Qwen2 trunk and one MTP module.

The module takes the hidden state before the final norm, hidden state first, and no token embedding
at position 0. The released checkpoints have one module; where `num_nextn_predict_layers` says more,
they chain.
"""

from __future__ import annotations

from dataclasses import replace

from mmtp_jax.families import tensors
from mmtp_jax.families.blocks import dense_attention, dense_layers, finished, wiring
from mmtp_jax.families.family import Family
from mmtp_jax.families.settings import Settings
from mmtp_jax.families.tensors import Sources
from mmtp_jax.specs import LayerSpec, ModelConfig


def parse(settings: Settings) -> ModelConfig:
    settings.only("attention_bias", True)
    settings.only("use_mrope", False)
    attention = dense_attention(settings, qkv_bias=True)
    layers = dense_layers(settings, attention)
    module = LayerSpec(replace(attention, window=None), layers[0].mlp) if layers else None
    count = settings.count("num_nextn_predict_layers", 0)
    mtp = wiring(
        settings,
        (module,) * count if module is not None else (),
        concat="hidden_first",
        target_hidden="pre",
        feed="chain_post",
        zero_first_embedding=True,
    )
    return finished(settings, "mimo", layers, mtp)


def sources(config: ModelConfig) -> Sources:
    found = tensors.trunk(config)
    for index, path, spec in tensors.modules(config):
        name = f"model.mtp_layers.{index}"
        found |= tensors.norm(f"{path}.token_norm", f"{name}.token_layernorm")
        found |= tensors.norm(f"{path}.hidden_norm", f"{name}.hidden_layernorm")
        found |= tensors.linear(f"{path}.fuse", f"{name}.input_proj")
        found |= tensors.norm(f"{path}.norm", f"{name}.final_layernorm")
        found |= tensors.layer(f"{path}.layer", name, spec)
    return found


FAMILY = Family("mimo", ("MiMoForCausalLM",), parse, sources)
