"""Step-3.5-Flash (model card of stepfun-ai/Step-3.5-Flash): three chained modules with own heads.

Norms are zero-centred, heads are gated, sliding layers have more heads than full ones, and rotary
embeddings differ from layer to layer. Modules are sliding, dense layers after the last; they are
fed the hidden state before the final norm and chain theirs before the head's norm (vLLM, SGLang
#18564; transformers uses the normed ones: `mtp_target_hidden="post"`, `mtp_feed="chain_post"`).

Step-3.7-Flash (model card of stepfun-ai/Step-3.7-Flash) is this model as `text_config` beside a
vision tower, which is not run: its tensors and config are skipped. Both dialects of it are read:
the release's, with the keys of Step-3.5, and that of transformers (`rope_parameters` by kind of
layer, modules in lists of their own).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mmtp_jax.families import tensors
from mmtp_jax.families.blocks import finished, rope_of, stop_ids, token_ids, wiring
from mmtp_jax.families.family import Family
from mmtp_jax.families.settings import Settings
from mmtp_jax.families.step_layers import StepLayer, read_layers
from mmtp_jax.families.tensors import Source, Sources
from mmtp_jax.specs import AttentionSpec, DenseSpec, LayerSpec, ModelConfig, MoESpec

# Of Step-3.7's config.json, what describes images.
_TOWER = (
    "image_token_id",
    "image_token_len",
    "patch_token_len",
    "projector_bias",
    "understand_projector_stride",
    "vision_config",
)


def parse(settings: Settings) -> ModelConfig:
    text = settings.table("text_config")
    if text is None:
        return _read(settings, settings)
    settings.ignore(*_TOWER)
    config = _read(settings, text)
    settings.finish()
    return config


def _read(settings: Settings, text: Settings) -> ModelConfig:
    """The model that `text` describes, part of `settings` or the same."""
    _refuse_unimplemented(text)
    count = text.count("num_hidden_layers")
    num_modules = text.count("num_nextn_predict_layers", 0)
    listed = read_layers(text, count, num_modules)
    full, sliding = _heads(text, [one.sliding for one in listed], count)
    dense = text.integer("intermediate_size")
    mixture = _mixture(text, needed=any(one.experts for one in listed))

    def layer(one: StepLayer) -> LayerSpec:
        attention = sliding if one.sliding else full
        assert one.rope.partial is not None
        rope = rope_of(one.rope, int(attention.head_dim * one.rope.partial))
        mlp: DenseSpec | MoESpec = DenseSpec(dense, limit=one.shared_limit)
        if mixture is not None and one.experts:
            assert mixture.shared is not None
            shared = replace(mixture.shared, limit=one.shared_limit)
            mlp = replace(mixture, limit=one.limit, shared=shared)
        return LayerSpec(replace(attention, rope=rope), mlp)

    layers = tuple(map(layer, listed))
    mtp = wiring(
        settings,
        layers[count:],
        concat="embed_first",
        target_hidden="pre",
        feed="chain_pre",
        own_head=True,
        zero_first_embedding=False,
    )
    text.ignore("max_seq_len")
    vocab_size = text.integer("vocab_size")
    options: dict[str, Any] = {
        "norm_eps": text.number("rms_norm_eps", 1e-5),
        "norm_style": "one_plus",
        "bos_token_id": next(iter(token_ids(settings, text, "bos_token_id")), None),
        "eos_token_ids": stop_ids(token_ids(settings, text, "eos_token_id"), vocab_size),
    }
    return finished(text, "step3p5", layers[:count], mtp, **options)


def _refuse_unimplemented(settings: Settings) -> None:
    for key in ("use_qk_norm", "zero_centered", "use_head_wise_attn_gate", "need_fp32_gate"):
        settings.only(key, True)
    for key in ("use_moe", "use_moe_router_bias", "norm_expert_weight"):
        settings.only(key, True)
    for key in ("sink", "attention_bias", "mlp_bias"):
        settings.only(key, False)
    settings.only("hidden_act", "silu")
    settings.only("att_impl_type", "GQA")
    settings.only("moe_router_activation", "sigmoid")
    settings.only("use_rope_layers", [])
    settings.only("moe_layer_offset", 0)
    settings.only("moe_every_n_layer", 1)


def _heads(
    settings: Settings, sliding: list[bool], count: int
) -> tuple[AttentionSpec, AttentionSpec]:
    """Full and sliding attention, without their rotary embeddings."""
    window = settings.integer("sliding_window", None)
    if window is None and any(sliding):
        raise settings.error("there are sliding_attention layers but no sliding_window")
    full = AttentionSpec(
        settings.integer("num_attention_heads"),
        _integer(settings, "num_attention_groups", "num_key_value_heads"),
        settings.integer("head_dim"),
        qk_norm=True,
        head_gate=True,
    )
    other = settings.table("attention_other_setting") or Settings({})
    other.only("attention_type", "sliding_attention")
    other.only("true_head_dim", full.head_dim)
    heads = settings.integer("num_sliding_attention_heads", full.num_heads)
    windowed = replace(
        full,
        num_heads=other.integer("num_attention_heads", heads),
        num_kv_heads=other.integer("num_attention_groups", full.num_kv_heads),
        head_dim=other.integer("head_dim", full.head_dim),
        window=window,
    )
    # transformers saves the same once more, layer by layer.
    table = settings.table("per_layer_config") or Settings({})
    for index in range(count):
        if sliding[index] and (one := table.table(str(index))) is not None:
            one.only("num_attention_heads", windowed.num_heads)
    settings.only("query_pre_attn_scalar", full.head_dim, float(full.head_dim))
    return full, windowed


def _integer(settings: Settings, released: str, saved: str) -> int:
    """The value under the release's name or the one that transformers saves."""
    if released not in settings and saved in settings:
        return int(settings.integer(saved))
    value: int = settings.integer(released)
    settings.only(saved, value)
    return value


def _mixture(settings: Settings, needed: bool) -> MoESpec | None:
    if not needed and not any(key in settings for key in ("moe_num_experts", "n_routed_experts")):
        return None
    return MoESpec(
        num_experts=_integer(settings, "moe_num_experts", "n_routed_experts"),
        top_k=_integer(settings, "moe_top_k", "num_experts_per_tok"),
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


FAMILY = Family(
    "step3p5",
    ("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"),
    parse,
    sources,
    skipped=("vision_model.", "vit_large_projector."),
    model_types=("step3p7",),
)
