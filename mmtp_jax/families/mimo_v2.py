"""MiMo-V2-Flash (model card of XiaomiMiMo/MiMo-V2-Flash): three modules fed by the target.

Full and sliding layers with different rotary bases, sinks, and values smaller than keys. Every
module sees the target's normed hidden state of its row (sglang-jax #1256 measured 0.75/0.73/0.73
acceptance, against 0.77/0.47/0.36 for chained outputs). config.json does not count the modules:
their tensors do, in a file that the index may not name.

Both dialects of config.json are read: the release's and that of transformers.
"""

from __future__ import annotations

from mmtp_jax.families import tensors
from mmtp_jax.families.blocks import finished, layer_kinds, rope_of, wiring
from mmtp_jax.families.family import Family
from mmtp_jax.families.mixtures import read_mixture
from mmtp_jax.families.rope import Scaling, read_rope, read_scaling
from mmtp_jax.families.settings import Settings
from mmtp_jax.families.tensors import Sources
from mmtp_jax.specs import AttentionSpec, DenseSpec, LayerSpec, ModelConfig

_MODULE = "model.mtp.layers."
_RELEASED_MODULES = 3
# What transformers rotates of a head where `rope_parameters` do not say.
_SAVED_PARTIAL = 0.334


def parse(settings: Settings) -> ModelConfig:
    settings.only("hidden_act", "silu")
    settings.only("attention_projection_layout", "split")
    settings.ignore("attention_chunk_size", "hybrid_block_size")
    count = settings.count("num_hidden_layers")
    sliding = _flags(settings, "layer_types", "hybrid_layer_pattern", 1, count)
    dense = _flags(settings, "mlp_layer_types", "moe_layer_freq", 0, count)
    full, windowed = _attention(settings)
    mlp, mixture = DenseSpec(settings.integer("intermediate_size")), None
    if not all(dense) or "n_routed_experts" in settings:
        mixture = read_mixture(settings, n_group=1, topk_group=1)
    layers = []
    for is_sliding, is_dense in zip(sliding, dense, strict=True):
        attention = windowed if is_sliding else full
        layers.append(LayerSpec(attention, mlp if is_dense or mixture is None else mixture))
    module = LayerSpec(windowed, mlp)
    mtp = wiring(
        settings,
        (module,) * _num_modules(settings),
        concat="embed_first",
        target_hidden="post",
        feed="target",
        zero_first_embedding=False,
    )
    eps = settings.number("layernorm_epsilon", settings.number("rms_norm_eps", 1e-5))
    return finished(settings, "mimo_v2", tuple(layers), mtp, norm_eps=eps)


def _flags(settings: Settings, saved: str, released: str, marked: int, count: int) -> list[bool]:
    """Which layers are of the special kind (sliding, dense), in either dialect."""
    names = ("full_attention", "sliding_attention") if marked else ("sparse", "dense")
    kinds = layer_kinds(settings, saved, count, names)
    if kinds is not None:
        settings.ignore(released)
        return [kind == names[1] for kind in kinds]
    pattern = settings.listing(released, length=count, of=int)
    if any(entry not in (0, 1) for entry in pattern):
        raise settings.error(f"{released} must hold 0 or 1 for each layer")
    return [entry == marked for entry in pattern]


def _attention(settings: Settings) -> tuple[AttentionSpec, AttentionSpec]:
    """Full and sliding attention."""
    heads, kv_heads = (settings.integer(f"num_{part}_heads") for part in ("attention", "key_value"))
    head_dim, value_dim = settings.integer("head_dim"), settings.integer("v_head_dim", None)
    full_rope, sliding_rope = _ropes(settings)
    scale = settings.number("attention_value_scale", 1.0)
    bias = settings.flag("attention_bias", False)

    def attention(
        prefix: str, rope: Scaling, window: int | None, sinks: bool, kv_heads: int
    ) -> AttentionSpec:
        size = settings.integer(f"{prefix}head_dim", head_dim)
        factor = 1.0 if rope.partial is None else rope.partial
        return AttentionSpec(
            num_heads=settings.integer(f"{prefix}num_attention_heads", heads),
            num_kv_heads=settings.integer(f"{prefix}num_key_value_heads", kv_heads),
            head_dim=size,
            rope=rope_of(rope, int(size * factor)),
            window=window,
            value_dim=settings.integer(f"{prefix}v_head_dim", value_dim),
            qkv_bias=bias,
            sinks=sinks,
            value_scale=scale,
        )

    full_sinks = settings.flag("add_full_attention_sink_bias", False)
    sinks = settings.flag("add_swa_attention_sink_bias", True)
    # transformers saves no swa_num_key_value_heads: sliding layers have twice as many.
    return (
        attention("", full_rope, None, full_sinks, kv_heads),
        attention("swa_", sliding_rope, _window(settings), sinks, 2 * kv_heads),
    )


def _window(settings: Settings) -> int:
    """Keys a sliding layer sees, itself included: `sliding_window_size` before itself (SGLang,
    transformers; vLLM counts itself in), or transformers' `sliding_window`, which includes it."""
    size, saved = (settings.integer(f"sliding_window{end}", None) for end in ("_size", ""))
    if size is None and saved is None:
        raise settings.error("there is neither sliding_window_size nor sliding_window")
    window: int = saved if size is None else size + 1
    return window


def _ropes(settings: Settings) -> tuple[Scaling, Scaling]:
    """The rotary embeddings of full and sliding layers."""
    table = settings.table("rope_parameters")
    partial = settings.number("partial_rotary_factor", None)
    if table is not None:
        kinds = [table.table(name) for name in ("full_attention", "sliding_attention")]
        if any(kind is None for kind in kinds):
            raise table.error("full_attention and sliding_attention are needed")
        limit = settings.integer("max_position_embeddings")
        partial = _SAVED_PARTIAL if partial is None else partial
        full, sliding = (read_scaling(kind, None, partial, limit) for kind in kinds if kind)
        if full.theta is None or sliding.theta is None:
            raise table.error("rope_theta is needed for both kinds")
        settings.ignore("rope_theta", "swa_rope_theta")
        return full, sliding
    full = read_rope(settings, settings.number("rope_theta"))
    if full.rope.scaling is not None:
        raise settings.error(f"rope type {full.rope.scaling!r} is not implemented for this family")
    return full, Scaling(settings.number("swa_rope_theta"), partial)


def _num_modules(settings: Settings) -> int:
    """As the tensors say, or (without weight files) as the config or the release does."""
    if "num_nextn_predict_layers" in settings or settings.tensor_names is None:
        return int(settings.count("num_nextn_predict_layers", _RELEASED_MODULES))
    numbers = {
        name.removeprefix(_MODULE).split(".")[0]
        for name in settings.tensor_names
        if name.startswith(_MODULE)
    }
    return sum(number.isdecimal() for number in numbers)


def sources(config: ModelConfig) -> Sources:
    found = tensors.trunk(config)
    for index, path, spec in tensors.modules(config):
        name = f"{_MODULE}{index}"
        found |= tensors.norm(f"{path}.token_norm", f"{name}.enorm")
        found |= tensors.norm(f"{path}.hidden_norm", f"{name}.hnorm")
        found |= tensors.linear(f"{path}.fuse", f"{name}.eh_proj")
        found |= tensors.norm(f"{path}.norm", f"{name}.final_layernorm")
        found |= tensors.layer(f"{path}.layer", name, spec, mlp_norm="pre_mlp_layernorm")
    return found


FAMILY = Family(
    "mimo_v2", ("MiMoV2FlashForCausalLM",), parse, sources, model_types=("mimo_v2_flash",)
)
