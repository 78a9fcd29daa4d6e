"""How DeepSeek's line of models configures experts, and the modules that go with them."""

from __future__ import annotations

from mmtp_jax.families.blocks import finished, wiring
from mmtp_jax.families.settings import Settings
from mmtp_jax.specs import (
    AttentionSpec,
    DenseSpec,
    LatentAttentionSpec,
    LayerSpec,
    ModelConfig,
    MoESpec,
)


def read_mixture(settings: Settings, **defaults: int) -> MoESpec:
    """Experts under the keys of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2); `defaults` are what
    a family has where `n_group` and `topk_group` are absent."""

    def groups(key: str) -> int:
        return int(settings.integer(key, defaults[key]) if defaults else settings.integer(key))

    settings.only("scoring_func", "sigmoid")
    settings.only("topk_method", "noaux_tc")
    size = settings.integer("moe_intermediate_size")
    shared = settings.integer("n_shared_experts", 0)
    return MoESpec(
        num_experts=settings.integer("n_routed_experts"),
        top_k=settings.integer("num_experts_per_tok"),
        size=size,
        num_groups=groups("n_group"),
        top_groups=groups("topk_group"),
        normalize=settings.flag("norm_topk_prob", True),
        scale=settings.number("routed_scaling_factor", 1.0),
        shared=DenseSpec(shared * size) if shared else None,
    )


def mixture_model(
    settings: Settings,
    family: str,
    attention: AttentionSpec | LatentAttentionSpec,
    experts: MoESpec,
) -> ModelConfig:
    """`first_k_dense_replace` dense layers, then mixtures. Modules are mixtures, take the normed
    hidden state and chain their own normed output."""
    settings.only("moe_layer_freq", 1)
    mixture = LayerSpec(attention, experts)
    dense = LayerSpec(attention, DenseSpec(settings.integer("intermediate_size")))
    count = settings.count("num_hidden_layers")
    first = min(settings.count("first_k_dense_replace"), count)
    mtp = wiring(
        settings,
        (mixture,) * settings.count("num_nextn_predict_layers", 0),
        concat="embed_first",
        target_hidden="post",
        feed="chain_post",
        zero_first_embedding=False,
    )
    return finished(settings, family, (dense,) * first + (mixture,) * (count - first), mtp)
