"""Step-3.5-Flash (model card of stepfun-ai/Step-3.5-Flash): three chained modules with own heads.

Norms are zero-centred, heads are gated, sliding layers have more heads than full ones, and rotary
embeddings differ from layer to layer. Modules are sliding, dense layers after the last; they are
fed the hidden state before the final norm and chain theirs before the head's norm (vLLM, SGLang
#18564; transformers uses the normed ones: `mtp_target_hidden="post"`, `mtp_feed="chain_post"`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mmtp_jax.families import tensors
from mmtp_jax.families.blocks import finished, layer_kinds, rope_of, wiring
from mmtp_jax.families.family import Family
from mmtp_jax.families.rope import Scaling, read_scaling
from mmtp_jax.families.settings import Settings
from mmtp_jax.families.tensors import Source, Sources
from mmtp_jax.specs import AttentionSpec, DenseSpec, LayerSpec, ModelConfig, MoESpec

_LIMITS = ("swiglu_limits", "swiglu_limits_shared")


@dataclass(frozen=True)
class _Layer:
    """What config.json lists layer by layer, the modules last."""

    sliding: bool
    theta: float
    partial: float
    limit: float | None
    shared_limit: float | None


def parse(settings: Settings) -> ModelConfig:
    _refuse_unimplemented(settings)
    count = settings.count("num_hidden_layers")
    num_modules = settings.count("num_nextn_predict_layers", 0)
    listed = _listed(settings, count, num_modules)
    scaling = _scaling(settings)
    full, sliding = _heads(settings)
    experts = _experts(settings, count + num_modules)
    dense = settings.integer("intermediate_size")
    mixture = _mixture(settings) if experts or "moe_num_experts" in settings else None

    def layer(index: int) -> LayerSpec:
        one = listed[index]
        attention = sliding if one.sliding else full
        base = Scaling(one.theta, None, scaling.rope if not one.sliding else Scaling().rope)
        rope = rope_of(base, int(attention.head_dim * one.partial))
        mlp: DenseSpec | MoESpec = DenseSpec(dense, limit=one.shared_limit)
        if mixture is not None and index in experts:
            assert mixture.shared is not None
            shared = replace(mixture.shared, limit=one.shared_limit)
            mlp = replace(mixture, limit=one.limit, shared=shared)
        return LayerSpec(replace(attention, rope=rope), mlp)

    mtp = wiring(
        settings,
        tuple(layer(count + index) for index in range(num_modules)),
        concat="embed_first",
        target_hidden="pre",
        feed="chain_pre",
        own_head=True,
        zero_first_embedding=False,
    )
    settings.ignore("max_seq_len")
    layers = tuple(layer(index) for index in range(count))
    eps = settings.number("rms_norm_eps", 1e-5)
    return finished(settings, "step3p5", layers, mtp, norm_eps=eps, norm_style="one_plus")


def _refuse_unimplemented(settings: Settings) -> None:
    for key in ("use_qk_norm", "zero_centered", "use_head_wise_attn_gate", "need_fp32_gate"):
        settings.only(key, True)
    for key in ("use_moe", "use_moe_router_bias", "norm_expert_weight"):
        settings.only(key, True)
    settings.only("sink", False)
    settings.only("hidden_act", "silu")
    settings.only("attention_bias", False)
    settings.only("att_impl_type", "GQA")
    settings.only("moe_router_activation", "sigmoid")
    settings.only("use_rope_layers", [])
    settings.only("moe_layer_offset", 0)
    settings.only("moe_every_n_layer", 1)


def _listed(settings: Settings, count: int, num_modules: int) -> list[_Layer]:
    """The per-layer lists; entries for modules may be missing and are then the release's."""

    def entries(key: str, of_module: Any) -> list[Any]:
        values = settings.listing(key)
        if len(values) < count:
            raise settings.error(f"{key} must have {count} entries, got {len(values)}")
        return [*values, *[of_module] * num_modules][: count + num_modules]

    def numbers(key: str, of_module: float, default: float | None = None) -> list[float]:
        if default is not None and key not in settings:
            return [default] * count + [of_module] * num_modules
        values = entries(key, of_module)
        for value in values:
            if not isinstance(value, int | float | None) or isinstance(value, bool):
                raise settings.error(f"{key} holds {value!r}, which is no number")
        return [float(value or 0.0) for value in values]

    kinds = Settings({"layer_types": entries("layer_types", "sliding_attention")})
    sliding = layer_kinds(kinds, "layer_types", count + num_modules)
    assert sliding is not None
    thetas = numbers("rope_theta", 10000.0)
    partials = numbers("partial_rotary_factors", 1.0, default=1.0)
    limits, shared = (numbers(key, 0.0, default=0.0) for key in _LIMITS)
    return [
        _Layer(kind == "sliding_attention", theta, partial, limit or None, shared_limit or None)
        for kind, theta, partial, limit, shared_limit in zip(
            sliding, thetas, partials, limits, shared, strict=True
        )
    ]


def _scaling(settings: Settings) -> Scaling:
    """The scaling of full layers' rotary embeddings."""
    limit = settings.integer("max_position_embeddings")
    table = settings.table("rope_scaling") or settings.table("rope_parameters")
    types = settings.listing("yarn_only_types", default=["full_attention"])
    if types != ["full_attention"]:
        raise settings.error(f"yarn_only_types={types} is not implemented")
    if table is None:
        return Scaling()
    for key in ("rope_theta", "partial_rotary_factor"):
        table.only(key)  # each layer has its own
    return read_scaling(table, None, None, limit)


def _heads(settings: Settings) -> tuple[AttentionSpec, AttentionSpec]:
    """Full and sliding attention, without their rotary embeddings."""
    options: dict[str, Any] = {"qk_norm": True, "head_gate": True}
    full = AttentionSpec(
        settings.integer("num_attention_heads"),
        settings.integer("num_attention_groups"),
        settings.integer("head_dim"),
        **options,
    )
    other = settings.table("attention_other_setting") or Settings({})
    other.only("attention_type", "sliding_attention")
    other.only("true_head_dim", full.head_dim)
    sliding = AttentionSpec(
        other.integer("num_attention_heads", full.num_heads),
        other.integer("num_attention_groups", full.num_kv_heads),
        other.integer("head_dim", full.head_dim),
        window=settings.integer("sliding_window"),
        **options,
    )
    return full, sliding


def _experts(settings: Settings, count: int) -> frozenset[int]:
    """Which of `count` layers and modules have experts: "3,4,...", or a list."""
    if isinstance(settings.peek("moe_layers_enum"), list):
        found = settings.listing("moe_layers_enum", of=int)
    else:
        named = settings.text("moe_layers_enum")
        parts = [part.strip() for part in named.split(",") if part.strip()]
        if not all(part.isdecimal() for part in parts):
            raise settings.error(f"moe_layers_enum must be layers like '3,4', got {named!r}")
        found = [int(part) for part in parts]
    for index in found:
        if not 0 <= index < count:
            raise settings.error(f"moe_layers_enum must lie in [0, {count}), got {index}")
    return frozenset(found)


def _mixture(settings: Settings) -> MoESpec:
    return MoESpec(
        num_experts=settings.integer("moe_num_experts"),
        top_k=settings.integer("moe_top_k"),
        size=settings.integer("moe_intermediate_size"),
        scale=settings.number("moe_router_scaling_factor", 1.0),
        shared=DenseSpec(settings.integer("share_expert_dim")),
    )


def sources(config: ModelConfig) -> Sources:
    found = tensors.plain("embed.weight", tensors.EMBEDDING) | tensors.norm("norm", "model.norm")
    if not config.tie_embeddings:
        found |= tensors.linear("head", "lm_head")
    for index, spec in enumerate(config.layers):
        found |= _layer(f"layers.{index}", f"model.layers.{index}", spec)
    for index, path, spec in tensors.modules(config):
        name = f"model.layers.{len(config.layers) + index}"
        head = f"{name}.transformer.shared_head"
        found |= tensors.norm(f"{path}.token_norm", f"{name}.enorm")
        found |= tensors.norm(f"{path}.hidden_norm", f"{name}.hnorm")
        found |= tensors.linear(f"{path}.fuse", f"{name}.eh_proj")
        found |= tensors.norm(f"{path}.norm", f"{head}.norm")
        found |= tensors.linear(f"{path}.head", f"{head}.output")
        found |= _layer(f"{path}.layer", name, spec)
    return found


def _layer(path: str, name: str, spec: LayerSpec) -> Sources:
    if isinstance(spec.mlp, DenseSpec):
        return tensors.layer(path, name, spec)
    assert isinstance(spec.attention, AttentionSpec) and spec.mlp.shared is not None
    found = tensors.norm(f"{path}.attention_norm", f"{name}.input_layernorm")
    found |= tensors.norm(f"{path}.mlp_norm", f"{name}.post_attention_layernorm")
    found |= tensors.grouped_attention(f"{path}.attention", f"{name}.self_attn", spec.attention)
    router = f"{path}.mlp.router"
    found[f"{router}.kernel"] = Source((f"{name}.moe.gate.weight",), transpose=True)
    found |= tensors.plain(f"{router}.bias", f"{name}.moe.router_bias")
    for part in ("gate", "up", "down"):
        names = (f"{name}.moe.{part}_proj.weight",)
        found[f"{path}.mlp.experts.{part}"] = Source(names, transpose=True)
    return found | tensors.dense_mlp(f"{path}.mlp.shared", f"{name}.share_expert")


FAMILY = Family("step3p5", ("Step3p5ForCausalLM",), parse, sources)
