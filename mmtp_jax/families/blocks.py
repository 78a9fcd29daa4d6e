"""What several families read alike from config.json."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mmtp_jax.families.rope import Scaling, read_rope
from mmtp_jax.families.settings import Settings
from mmtp_jax.specs import (
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    ModelConfig,
    MTPConfig,
    RopeConfig,
)


def rope_of(scaling: Scaling, dim: int, **changes: Any) -> RopeConfig:
    """The rotary embedding of heads of `dim` entries."""
    assert scaling.theta is not None
    return replace(scaling.rope, dim=dim, theta=scaling.theta, **changes)


def dense_attention(
    settings: Settings, *, qkv_bias: bool, head_dim: int | None = None, **options: Any
) -> AttentionSpec:
    """Grouped-query attention under the usual keys; `head_dim` is the family's default (None: what
    the heads leave), `options` go to `AttentionSpec`."""
    settings.only("hidden_act", "silu")
    settings.only("hidden_activation", "silu")
    heads = settings.integer("num_attention_heads")
    hidden = settings.integer("hidden_size")
    head_dim = settings.integer("head_dim", head_dim)
    if head_dim is None:
        if heads < 1 or hidden % heads:
            raise settings.error(
                f"num_attention_heads ({heads}) must divide hidden_size ({hidden}) or head_dim be"
                " given"
            )
        head_dim = hidden // heads
    scaling = read_rope(settings)
    if scaling.partial not in (None, 1.0):
        raise settings.error(
            f"partial_rotary_factor={scaling.partial} is not implemented for this family"
        )
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=settings.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        rope=rope_of(scaling, head_dim),
        qkv_bias=qkv_bias,
        **options,
    )


def dense_layers(settings: Settings, attention: AttentionSpec) -> tuple[LayerSpec, ...]:
    """Equal layers, but for the windows of Qwen's configs."""
    mlp = DenseSpec(settings.integer("intermediate_size"))
    return tuple(
        LayerSpec(replace(attention, window=window), mlp) for window in qwen_windows(settings)
    )


def qwen_windows(settings: Settings) -> list[int | None]:
    """Each layer's window: Qwen slides from layer `max_window_layers` on, unless `layer_types`
    says it layer by layer."""
    count = settings.count("num_hidden_layers")
    slides = settings.flag("use_sliding_window", False)
    window = settings.integer("sliding_window", None)
    first = settings.integer("max_window_layers", None)
    kinds = layer_kinds(settings, "layer_types", count)
    if not slides:
        if kinds is not None and "sliding_attention" in kinds:
            raise settings.error("there are sliding_attention layers but no sliding_window in use")
        return [None] * count
    if window is None or (kinds is None and first is None):
        raise settings.error("use_sliding_window needs sliding_window and max_window_layers")
    if kinds is None:
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(count)]
    return [window if kind == "sliding_attention" else None for kind in kinds]


def layer_kinds(
    settings: Settings,
    key: str,
    count: int,
    kinds: tuple[str, str] = ("full_attention", "sliding_attention"),
) -> list[str] | None:
    """One of two kinds for each of `count` layers; None if the key is absent."""
    found: list[str] | None = settings.listing(key, default=None)
    if found is None:
        return None
    if len(found) != count or any(kind not in kinds for kind in found):
        raise settings.error(
            f"{key} must name {' or '.join(kinds)} for each of the {count} layers, got"
            f" {len(found)} entries of {sorted(set(map(str, found)))}"
        )
    return found


def token_ids(settings: Settings, text: Settings, key: str) -> tuple[int, ...]:
    """The ids of a model whose `text_config` is `text`: releases may have them outside, and those
    inside are then transformers' defaults."""
    outer, inner = settings.token_ids(key), text.token_ids(key)
    return outer if key in settings else inner


def stop_ids(token_ids: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """Only the vocabulary's: no logit belongs to a token beyond it, which never ends a text."""
    return tuple(token_id for token_id in token_ids if 0 <= token_id < vocab_size)


def finished(
    settings: Settings,
    family: str,
    layers: tuple[LayerSpec, ...],
    mtp: MTPConfig | None = None,
    **options: Any,
) -> ModelConfig:
    """The model under the usual keys; `options` go to `ModelConfig`. `finish`es the settings."""
    vocab_size = settings.integer("vocab_size")
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": settings.integer("hidden_size"),
        "max_position": settings.integer("max_position_embeddings"),
        "norm_eps": settings.number("rms_norm_eps", 1e-6),
        "tie_embeddings": settings.flag("tie_word_embeddings", False),
        "bos_token_id": next(iter(settings.token_ids("bos_token_id")), None),
        "eos_token_ids": stop_ids(settings.token_ids("eos_token_id"), vocab_size),
    }
    settings.finish()
    return ModelConfig(family=family, layers=layers, mtp=mtp, **(common | options))


def wiring(settings: Settings, modules: tuple[LayerSpec, ...], **defaults: Any) -> MTPConfig | None:
    """The modules' wiring: a family's own, unless the config says otherwise.

    Engines disagree about some of it, so each choice can be set in config.json or by
    `hf_overrides`: `mtp_target_hidden`, `mtp_feed`, `mtp_zero_first_embedding`, `mtp_embed_norm`,
    `mtp_consumed_position`, `mtp_concat`.
    """
    for key in ("target_hidden", "feed", "concat"):
        defaults[key] = settings.text(f"mtp_{key}", defaults.get(key))
    for key in ("zero_first_embedding", "embed_norm", "consumed_position"):
        defaults[key] = settings.flag(f"mtp_{key}", defaults.get(key))
    given = {key: value for key, value in defaults.items() if value is not None}
    return MTPConfig(modules, **given) if modules else None
