"""`ModelConfig` from a Hugging Face config.json.

Every key that would change the mathematics and is not implemented is refused by name; the rest of
a config (training, generation and library bookkeeping) is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmtp_jax.config import LayerSpec, ModelConfig, MTPConfig, RopeConfig
from mmtp_jax.weights.errors import ModelError

_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "MiMoForCausalLM": "mimo",
}

# The only values that are implemented; null and an absent key are always fine.
_IMPLEMENTED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "hidden_activation": ("silu",),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "rotary_pct": (1.0,),
    "quantization_config": (),
    "compression_config": (),
    "num_local_experts": (0,),
    "num_experts": (0,),
    "n_routed_experts": (0,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "logit_scale": (1.0,),
    "qk_norm": (False,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "clip_qkv": (),
    "no_rope_layers": (),
    "dual_chunk_attention_config": (),
}

# What the keys that are read have to hold; null and an absent key are judged where they are read.
_TYPES: tuple[tuple[str, tuple[type, ...], tuple[str, ...]], ...] = (
    (
        "an integer",
        (int,),
        (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "num_nextn_predict_layers",
            "sliding_window",
            "max_window_layers",
        ),
    ),
    ("a number", (int, float), ("rms_norm_eps", "rope_theta")),
    (
        "true or false",
        (bool,),
        ("tie_word_embeddings", "attention_bias", "use_sliding_window"),
    ),
    ("a list", (list,), ("architectures", "layer_types")),
    ("an object", (dict,), ("rope_scaling", "rope_parameters")),
)

# Biases and windows of one family are fixed where another makes them optional.
_IMPLEMENTED_BY_FAMILY: dict[str, dict[str, tuple[object, ...]]] = {
    "llama": {
        "sliding_window": (),
        "use_sliding_window": (False,),
        "num_nextn_predict_layers": (0,),
    },
    "qwen2": {"attention_bias": (True,), "num_nextn_predict_layers": (0,)},
    "mimo": {"attention_bias": (True,)},
}


def parse_config(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """The model that config.json and generation_config.json (empty if absent) describe.

    Raises `ModelError` for an unknown architecture, a missing key, or a value that is not
    implemented.
    """
    _check_types(config)
    family = _family(config)
    _refuse_unimplemented(config, family)
    try:
        layers = _layers(config, family)
        return ModelConfig(
            family=family,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            layers=layers,
            max_position=config["max_position_embeddings"],
            norm_eps=_get(config, "rms_norm_eps", 1e-6),
            tie_embeddings=_get(config, "tie_word_embeddings", False),
            bos_token_id=next(iter(_token_ids("bos_token_id", generation, config)), None),
            eos_token_ids=_token_ids("eos_token_id", generation, config),
            mtp=_mtp(config, layers) if family == "mimo" else None,
        )
    except KeyError as error:
        raise ModelError(f"config.json lacks the key {error.args[0]!r}") from None
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ModelError(f"config.json holds a value that cannot work: {error}") from None


def _check_types(config: Mapping[str, Any]) -> None:
    for words, types, keys in _TYPES:
        for key in keys:
            value = config.get(key)
            fits = isinstance(value, types) and (bool in types or not isinstance(value, bool))
            if value is not None and not fits:
                raise ModelError(f"config.json sets {key}={value!r}, which is not {words}")


def _get(config: Mapping[str, Any], key: str, default: Any) -> Any:
    """The value of `key`, or `default` where it is absent or null."""
    value = config.get(key)
    return default if value is None else value


def _family(config: Mapping[str, Any]) -> str:
    architectures = [str(name) for name in config.get("architectures") or []]
    for name in architectures:
        if name in _FAMILIES:
            return _FAMILIES[name]
    raise ModelError(
        f"architecture {', '.join(architectures) or '(none given)'} is not supported;"
        f" supported: {', '.join(_FAMILIES)}"
    )


def _refuse_unimplemented(config: Mapping[str, Any], family: str) -> None:
    for key, values in (_IMPLEMENTED | _IMPLEMENTED_BY_FAMILY[family]).items():
        value = config.get(key)
        if value is not None and value not in values:
            only = f" (only {', '.join(map(repr, values))} is)" if values else ""
            raise ModelError(f"config.json sets {key}={value!r}, which is not implemented{only}")


def _layers(config: Mapping[str, Any], family: str) -> tuple[LayerSpec, ...]:
    heads = config["num_attention_heads"]
    head_dim = _get(config, "head_dim", config["hidden_size"] // heads)
    attention_bias = _get(config, "attention_bias", False)
    return tuple(
        LayerSpec(
            num_heads=heads,
            num_kv_heads=_get(config, "num_key_value_heads", heads),
            head_dim=head_dim,
            intermediate_size=config["intermediate_size"],
            rope=_rope(config, head_dim),
            window=window,
            qkv_bias=attention_bias if family == "llama" else True,
            output_bias=attention_bias and family == "llama",
        )
        for window in _windows(config)
    )


def _windows(config: Mapping[str, Any]) -> list[int | None]:
    """Each layer's window: Qwen2 slides from layer `max_window_layers` on, unless `layer_types`
    says it layer by layer."""
    count = config["num_hidden_layers"]
    if not config.get("use_sliding_window") or config.get("sliding_window") is None:
        if "sliding_attention" in (config.get("layer_types") or ()):
            raise ModelError("config.json has sliding_attention layers but no sliding_window")
        return [None] * count
    window, first = config["sliding_window"], _get(config, "max_window_layers", count)
    types = config.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(count)
    ]
    if len(types) != count or any(
        kind not in ("sliding_attention", "full_attention") for kind in types
    ):
        raise ModelError(
            f"layer_types must name full_attention or sliding_attention for each of the {count}"
            f" layers, got {len(types)} entries of {sorted(set(map(str, types)))}"
        )
    return [window if kind == "sliding_attention" else None for kind in types]


def _rope(config: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """The rotary embedding in either dialect: `rope_theta` + `rope_scaling`, or `rope_parameters`.

    The scaling is that of the Llama 3.1 model card or none.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelError("rope_parameters per layer type are not implemented")
    theta = _get(rope, "rope_theta", _get(config, "rope_theta", 10000.0))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise ModelError("config.json sets a partial_rotary_factor, which is not implemented")
    if kind == "default":
        return RopeConfig(dim=head_dim, theta=theta)
    if kind != "llama3":
        raise ModelError(f"rope type {kind!r} is not implemented; implemented: default, llama3")
    return RopeConfig(
        dim=head_dim,
        theta=theta,
        scaling="llama3",
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_position=rope["original_max_position_embeddings"],
    )


def _mtp(config: Mapping[str, Any], layers: tuple[LayerSpec, ...]) -> MTPConfig | None:
    """MiMo-7B's modules: a trunk layer each, fed the hidden state before the final norm.

    The released checkpoints have one; where `num_nextn_predict_layers` says more, they chain.
    """
    count = config.get("num_nextn_predict_layers") or 0
    if count == 0 or not layers:  # without layers there is no model either
        return None
    layer = layers[0]
    module = LayerSpec(
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        intermediate_size=layer.intermediate_size,
        rope=layer.rope,
        qkv_bias=layer.qkv_bias,
    )
    return MTPConfig(
        modules=(module,) * count,
        concat="hidden_first",
        target_hidden="pre",
        feed="chain_post",
        own_norm=True,
        zero_first_embedding=True,
    )


def _token_ids(key: str, *configs: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids under `key`, an int or a list, of several configs in order and without repeats."""
    ids: list[int] = []
    for config in configs:
        value = config.get(key)
        found = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(one, bool) or not isinstance(one, int) for one in found):
            raise ModelError(f"{key}={value!r} is neither a token id nor a list of them")
        ids += found
    return tuple(dict.fromkeys(ids))
