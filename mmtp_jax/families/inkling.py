"""Inkling and Inkling-Small (model cards of thinkingmachines/Inkling): eight MTP modules.

Sliding and global layers with a bias by distance instead of rotary embeddings, short convolutions
in every branch, experts with sinks, muP logits. Modules chain their raw output, or one shared norm
of it; they are dense and sliding or global each. The vision and audio towers are not run: their
tensors (`model.visual.*`, `model.audio.*`) and configs are skipped.

Both dialects of config.json are read: the release's (`dense_intermediate_size` is there, and
`intermediate_size` is that of an expert) and that of transformers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from mmtp_jax.families import tensors
from mmtp_jax.families.blocks import layer_kinds, stop_ids, token_ids, wiring
from mmtp_jax.families.family import Family
from mmtp_jax.families.settings import Settings
from mmtp_jax.families.tensors import Source, Sources
from mmtp_jax.specs import (
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    LogScaling,
    ModelConfig,
    MoESpec,
    MTPConfig,
    RelativeBias,
)

_TOWERS = (
    "audio_config",
    "vision_config",
    "audio_bos_token_id",
    "audio_token_id",
    "image_bos_token_id",
    "image_token_id",
)


@dataclass(frozen=True)
class _Blocks:
    """The kinds of attention and MLP that layers and modules combine."""

    sliding: AttentionSpec
    full: AttentionSpec
    dense: DenseSpec
    mixture: MoESpec
    conv_taps: int

    def layer(self, sliding: bool, dense: bool) -> LayerSpec:
        attention = self.sliding if sliding else self.full
        return LayerSpec(attention, self.dense if dense else self.mixture, self.conv_taps)


def parse(settings: Settings) -> ModelConfig:
    settings.ignore(*_TOWERS)
    text = settings.table("text_config")
    if text is None:
        raise settings.error("text_config is missing")
    for key in ("q_bias", "o_bias"):
        text.only(key, False)
    for key in ("norm_after_topk", "shared_expert_sink"):
        text.only(key, True)
    text.only("hidden_act", "silu")
    text.only("gate_activation", "sigmoid")
    text.only("final_logit_softcapping")
    text.only("tie_word_embeddings", False)
    settings.only("tie_word_embeddings", False)
    text.ignore("number_of_conv_states", "rms_norm_eps_moe_gate")
    blocks = _blocks(text)
    layers = tuple(
        blocks.layer(sliding, dense)
        for sliding, dense in zip(_sliding(text), _dense(text), strict=True)
    )
    padded = text.integer("vocab_size")
    vocab_size = text.integer("unpadded_vocab_size", padded)
    limit = text.integer("model_max_length", text.integer("max_position_embeddings", None))
    if limit is None:
        raise text.error("there is neither model_max_length nor max_position_embeddings")
    config = ModelConfig(
        family="inkling",
        vocab_size=vocab_size,
        padded_vocab_size=padded,
        hidden_size=text.integer("hidden_size"),
        layers=layers,
        max_position=limit,
        norm_eps=text.number("rms_norm_eps", 1e-6),
        embed_norm=text.flag("use_embed_norm", True),
        logits_divisor=text.number("logits_mup_width_multiplier", 1.0),
        bos_token_id=next(iter(token_ids(settings, text, "bos_token_id")), None),
        eos_token_ids=stop_ids(token_ids(settings, text, "eos_token_id"), vocab_size),
        mtp=_modules(settings, text, blocks),
    )
    settings.finish()
    return config


def _blocks(text: Settings) -> _Blocks:
    released = "dense_intermediate_size" in text
    expert, dense = "moe_intermediate_size", "intermediate_size"
    if released:
        expert, dense = "intermediate_size", "dense_intermediate_size"
    scaled = text.flag("use_global_scale", True)
    kernel = text.integer("sconv_kernel_size", text.integer("conv_kernel_size", 4))
    window, rank = text.integer("sliding_window_size"), text.integer("d_rel")
    floor = text.integer("log_scaling_n_floor", None)
    alpha = text.number("log_scaling_alpha", 0.1)

    def attention(
        prefix: str, window: int | None, extent: int, scaling: LogScaling | None
    ) -> AttentionSpec:
        head_dim = text.integer(f"{prefix}head_dim")
        if head_dim < 1:
            raise text.error(f"{prefix}head_dim must be >= 1, got {head_dim}")
        return AttentionSpec(
            num_heads=text.integer(f"{prefix}num_attention_heads"),
            num_kv_heads=text.integer(f"{prefix}num_key_value_heads"),
            head_dim=head_dim,
            window=window,
            scale=1 / head_dim,
            qk_norm=True,
            relative=RelativeBias(rank, extent),
            log_scaling=scaling,
        )

    return _Blocks(
        sliding=attention("swa_", window, window, None),
        full=attention(
            "",
            None,
            text.integer("rel_extent"),
            None if floor is None else LogScaling(floor, alpha),
        ),
        dense=DenseSpec(text.integer(dense), global_scale=scaled),
        mixture=MoESpec(
            num_experts=text.integer("n_routed_experts"),
            top_k=text.integer("num_experts_per_tok"),
            size=text.integer(expert),
            selection_bias=text.flag("use_gate_bias", True),
            scale=text.number("route_scale", 1.0),
            global_scale=scaled,
            num_sinks=text.integer("n_shared_experts", 0),
        ),
        conv_taps=kernel if text.flag("use_sconv", True) else 0,
    )


def _sliding(text: Settings) -> list[bool]:
    count = text.count("num_hidden_layers")
    kinds = layer_kinds(text, "layer_types", count, ("hybrid", "hybrid_sliding"))
    local = text.listing("local_layer_ids", of=int, default=None)
    if kinds is not None:
        return [kind == "hybrid_sliding" for kind in kinds]
    if local is None:
        return [(index + 1) % 6 != 0 for index in range(count)]
    return _members(text, "local_layer_ids", local, count)


def _dense(text: Settings) -> list[bool]:
    count = text.count("num_hidden_layers")
    kinds = layer_kinds(text, "mlp_layer_types", count, ("dense", "sparse"))
    first = text.integer("dense_mlp_idx", 0)
    if kinds is not None:
        return [kind == "dense" for kind in kinds]
    return [index < first for index in range(count)]


def _members(settings: Settings, key: str, indices: list[int], count: int) -> list[bool]:
    for index in indices:
        if not 0 <= index < count:
            raise settings.error(f"{key} must lie in [0, {count}), got {index}")
    return [index in indices for index in range(count)]


def _modules(settings: Settings, text: Settings, blocks: _Blocks) -> MTPConfig | None:
    """`mtp_config` of the release, or the same under other names in transformers' text_config.

    `mtp_windowed` (true) says whether sliding modules have their window.
    """
    table = settings.table("mtp_config") or Settings({})
    count = text.count("num_mtp_layers", 0)
    for name in ("n_layers", "num_nextn_predict_layers"):
        count = table.count(name, count)
    local = table.listing("local_layer_ids", of=int, default=None)
    saved = text.listing("mtp_local_layer_ids", of=int, default=None)
    local = saved if local is None else local
    shared = table.flag("chain_hidden_post_norm", text.flag("chain_hidden_post_norm", False))
    first = text.flag("mtp_hidden_states_first", True)
    extent = table.integer("local_extent", blocks.sliding.window)
    window = extent if settings.flag("mtp_windowed", True) else None
    relative = RelativeBias(text.integer("d_rel"), extent)
    sliding = dataclasses.replace(blocks.sliding, window=window, relative=relative)
    modules = tuple(
        LayerSpec(sliding if is_sliding else blocks.full, blocks.dense, blocks.conv_taps)
        for is_sliding in _members(settings, "local_layer_ids of the modules", local or [], count)
    )
    return wiring(
        settings,
        modules,
        concat="hidden_first" if first else "embed_first",
        target_hidden="post",
        feed="chain_post",
        norm="shared" if shared else "none",
        embed_norm=True,
        zero_first_embedding=False,
        consumed_position=True,
    )


def sources(config: ModelConfig) -> Sources:
    found = tensors.plain("embed.weight", "model.llm.embed.weight")
    if config.embed_norm:
        found |= tensors.norm("embed_norm", "model.llm.embed_norm")
    found |= tensors.norm("norm", "model.llm.norm")
    found |= tensors.linear("head", "model.llm.unembed")
    for index, spec in enumerate(config.layers):
        found |= _layer(f"layers.{index}", f"model.llm.layers.{index}", spec)
    for index, path, spec in tensors.modules(config):
        name = f"model.mtp.layers.{index}"
        found |= tensors.norm(f"{path}.hidden_norm", f"{name}.hidden_norm")
        found |= tensors.norm(f"{path}.token_norm", f"{name}.embed_norm")
        found |= tensors.linear(f"{path}.fuse", f"{name}.input_proj")
        found |= _layer(f"{path}.layer", f"{name}.transformer_block", spec)
    if config.mtp is not None and config.mtp.norm == "shared":
        found |= tensors.norm("mtp.norm", "model.mtp.chain_norm")
    return found


def _layer(path: str, name: str, spec: LayerSpec) -> Sources:
    attention, inner = f"{path}.attention", f"{name}.attn"
    found = tensors.norm(f"{path}.attention_norm", f"{name}.attn_norm")
    found |= tensors.norm(f"{path}.mlp_norm", f"{name}.mlp_norm")
    for part, stored in (("q", "wq_du"), ("k", "wk_dv"), ("v", "wv_dv"), ("o", "wo_ud")):
        found |= tensors.linear(f"{attention}.{part}", f"{inner}.{stored}")
    found |= tensors.linear(f"{attention}.relative.rows", f"{inner}.wr_du")
    found |= tensors.plain(f"{attention}.relative.table", f"{inner}.rel_logits_proj.proj")
    found |= tensors.norm(f"{attention}.q_norm", f"{inner}.q_norm")
    found |= tensors.norm(f"{attention}.k_norm", f"{inner}.k_norm")
    if spec.conv_taps:
        for conv, stored in (
            (f"{attention}.k_conv", f"{inner}.k_sconv"),
            (f"{attention}.v_conv", f"{inner}.v_sconv"),
            (f"{path}.attention_conv", f"{name}.attn_sconv"),
            (f"{path}.mlp_conv", f"{name}.mlp_sconv"),
        ):
            found[f"{conv}.taps"] = Source((f"{stored}.weight",), taps=True)
    if isinstance(spec.mlp, DenseSpec):
        return found | _dense_mlp(f"{path}.mlp", f"{name}.mlp", spec.mlp)
    return found | _mixture(f"{path}.mlp", f"{name}.mlp", spec.mlp)


def _dense_mlp(path: str, name: str, spec: DenseSpec) -> Sources:
    """Gate and up alternate row by row in one tensor."""
    found = {
        f"{path}.{part}.kernel": Source((f"{name}.w13_dn.weight",), transpose=True, rows=row)
        for row, part in enumerate(("gate", "up"))
    }
    found |= tensors.linear(f"{path}.down", f"{name}.w2_md")
    if spec.global_scale:
        found |= tensors.plain(f"{path}.scale", f"{name}.global_scale")
    return found


def _mixture(path: str, name: str, spec: MoESpec) -> Sources:
    found = {f"{path}.router.kernel": Source((f"{name}.gate.weight",), transpose=True)}
    if spec.selection_bias:
        found |= tensors.plain(f"{path}.router.bias", f"{name}.gate.bias")
    if spec.global_scale:
        found |= tensors.plain(f"{path}.router.scale", f"{name}.gate.global_scale")
    stacks = [("experts", f"{name}.experts.")]
    if spec.num_sinks:
        stacks.append(("sinks", f"{name}.shared_experts.shared_"))
    for stack, prefix in stacks:
        for row, part in enumerate(("gate", "up")):
            names = (f"{prefix}w13_weight",)
            found[f"{path}.{stack}.{part}"] = Source(names, transpose=True, rows=row)
        found[f"{path}.{stack}.down"] = Source((f"{prefix}w2_weight",), transpose=True)
    return found


FAMILY = Family(
    "inkling",
    ("InklingForConditionalGeneration",),
    parse,
    sources,
    skipped=("model.visual.", "model.audio."),
    model_types=("inkling_mm_model",),
    published={66: 975e9, 42: 276e9},
)
