"""The layout of MiMo-7B (model card), generalised to any number of chained modules.

A Llama block is a Qwen2 block whose biases of q, k and v are zero. What else a target or its wiring
may have and the layout cannot say is found by reading back what was written: it must describe the
same model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mmtp_jax.families.registry import parse_config
from mmtp_jax.modules.identity import difference
from mmtp_jax.specs import AttentionSpec, DenseSpec, LayerSpec, ModelConfig, RopeConfig
from mmtp_jax.weights.errors import ModelError

FAMILIES = ("llama", "qwen2", "mimo")


def mimo_model(model: ModelConfig) -> ModelConfig:
    """`model` as the layout has it: with biases.

    Raises `ModelError` for a target of another family, or without modules.
    """
    if model.family not in FAMILIES:
        raise ModelError(
            f"the MiMo layout has no place for a target of the family {model.family};"
            f" it takes {', '.join(FAMILIES)}"
        )
    if model.mtp is None:
        raise ModelError("the model ships no MTP modules: a speculative model has to name some")
    modules = replace(model.mtp, modules=tuple(map(_with_biases, model.mtp.modules)))
    layers = tuple(map(_with_biases, model.layers))
    return replace(model, family="mimo", layers=layers, mtp=modules)


def mimo_config(
    model: ModelConfig, dtype: str, generation: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and generation_config.json of a `mimo_model`; `generation` is the source's.

    Raises `ModelError` naming what the layout cannot say.
    """
    assert model.mtp is not None
    tokens = {"bos_token_id": model.bos_token_id, "eos_token_id": _one_or_all(model.eos_token_ids)}
    config = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "torch_dtype": dtype,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": len(model.layers),
        "num_nextn_predict_layers": model.mtp.num_modules,
        "max_position_embeddings": model.max_position,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "use_cache": True,
        **_block(model.layers[0]),
        **_windows(model.layers),
        **tokens,
    }
    generation = dict(generation) | tokens
    found = difference(model, parse_config(config, generation))
    if found is not None:
        raise ModelError(f"the MiMo layout cannot say what the model has: {found}")
    return config, generation


def _with_biases(layer: LayerSpec) -> LayerSpec:
    if not isinstance(layer.attention, AttentionSpec):
        return layer
    return replace(layer, attention=replace(layer.attention, qkv_bias=True))


def _block(layer: LayerSpec) -> dict[str, Any]:
    """What all layers and modules share."""
    attention, mlp = layer.attention, layer.mlp
    # Those of the families above have nothing else.
    assert isinstance(attention, AttentionSpec) and isinstance(mlp, DenseSpec)
    assert attention.rope is not None
    return {
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "intermediate_size": mlp.size,
        "hidden_act": "silu",
        "rope_theta": attention.rope.theta,
        "rope_scaling": _rope_scaling(attention.rope),
    }


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.scaling is None:
        return None
    scaling: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "linear":
        return scaling
    scaling["original_max_position_embeddings"] = rope.original_max_position
    names = {
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate"),
    }
    return scaling | {name: getattr(rope, name) for name in names[rope.scaling]}


def _windows(layers: tuple[LayerSpec, ...]) -> dict[str, Any]:
    windows = [layer.attention.window for layer in layers]
    sliding = [index for index, window in enumerate(windows) if window is not None]
    if not sliding:
        return {"use_sliding_window": False, "sliding_window": None}
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return {
        "use_sliding_window": True,
        "sliding_window": windows[sliding[0]],
        "max_window_layers": sliding[0],
        "layer_types": kinds,
    }


def _one_or_all(token_ids: tuple[int, ...]) -> int | list[int] | None:
    if len(token_ids) < 2:
        return token_ids[0] if token_ids else None
    return list(token_ids)
