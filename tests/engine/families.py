"""Small models in the shape of every family that ships modules.

Sizes that a released checkpoint makes large (windows, the floor of log scaling, original contexts,
limits) are so small here that they change the results of short texts.
"""

from __future__ import annotations

from dataclasses import replace

from engine.models import HIDDEN, VOCAB, model

from mmtp_jax.specs import (
    AttentionSpec,
    DenseSpec,
    LatentAttentionSpec,
    LayerSpec,
    LogScaling,
    ModelConfig,
    MoESpec,
    MTPConfig,
    RelativeBias,
    RopeConfig,
)

DENSE = DenseSpec(24)
SCALED_DENSE = DenseSpec(24, global_scale=True)

INKLING_LOCAL = AttentionSpec(
    4, 2, 8, scale=1 / 8, window=5, qk_norm=True, relative=RelativeBias(3, 5)
)
INKLING_GLOBAL = AttentionSpec(
    2,
    1,
    8,
    scale=1 / 8,
    qk_norm=True,
    relative=RelativeBias(3, 7),
    log_scaling=LogScaling(6, alpha=0.5),
)
INKLING_EXPERTS = MoESpec(6, 2, 12, scale=2.0, global_scale=True, num_sinks=2)


def inkling() -> ModelConfig:
    """Local and global layers with convolutions, sink experts, modules without norms."""
    local = LayerSpec(INKLING_LOCAL, SCALED_DENSE, conv_taps=4)
    far = LayerSpec(INKLING_GLOBAL, SCALED_DENSE, conv_taps=4)
    return ModelConfig(
        "inkling",
        VOCAB,
        HIDDEN,
        (local, LayerSpec(INKLING_GLOBAL, INKLING_EXPERTS, conv_taps=4)),
        256,
        norm_eps=1e-6,
        padded_vocab_size=VOCAB + 8,
        embed_norm=True,
        logits_divisor=4.0,
        mtp=MTPConfig(
            (local, far, local, local),
            target_hidden="post",
            norm="none",
            embed_norm=True,
            zero_first_embedding=False,
        ),
    )


def inkling_shared_norm() -> ModelConfig:
    """The chain's norm, the modules' tokens as they are in the table, positions of the rows."""
    family = inkling()
    assert family.mtp is not None
    mtp = replace(
        family.mtp,
        modules=family.mtp.modules[:2],
        norm="shared",
        embed_norm=False,
        consumed_position=False,
    )
    return replace(family, mtp=mtp)


def mimo_v2() -> ModelConfig:
    """Values smaller than keys, sinks in sliding layers, modules fed by the target."""
    rope = RopeConfig(4, theta=100.0)
    everywhere = AttentionSpec(4, 1, 8, RopeConfig(4, theta=1000.0), value_dim=6, value_scale=0.7)
    sliding = AttentionSpec(4, 2, 8, rope, window=5, value_dim=6, value_scale=0.7, sinks=True)
    mtp = MTPConfig(
        (LayerSpec(sliding, DENSE),) * 3,
        concat="embed_first",
        target_hidden="post",
        feed="target",
        zero_first_embedding=False,
    )
    layers = (LayerSpec(everywhere, DENSE), LayerSpec(sliding, MoESpec(8, 2, 12)))
    return replace(model(layers, mtp), tie_embeddings=False)


def step() -> ModelConfig:
    """Zero-centred norms, gated heads, clamped MLPs, modules with heads of their own."""
    llama3 = RopeConfig(4, 10.0, scaling="llama3", factor=2.0, original_max_position=32)
    everywhere = AttentionSpec(4, 2, 8, llama3, qk_norm=True, head_gate=True)
    sliding = AttentionSpec(6, 2, 8, RopeConfig(8, 100.0), window=5, qk_norm=True, head_gate=True)
    experts = MoESpec(8, 3, 12, scale=3.0, limit=0.4, shared=DenseSpec(12, limit=0.6))
    mtp = MTPConfig(
        (LayerSpec(sliding, DENSE),) * 3,
        concat="embed_first",
        feed="chain_pre",
        own_head=True,
        zero_first_embedding=False,
    )
    layers = (LayerSpec(everywhere, DenseSpec(24, limit=0.5)), LayerSpec(sliding, experts))
    return replace(model(layers, mtp), norm_style="one_plus", tie_embeddings=False)


def deepseek() -> ModelConfig:
    """Latent attention and experts in groups, in the target and in the modules."""
    yarn = RopeConfig(
        8,
        100.0,
        interleaved=True,
        scaling="yarn",
        factor=4.0,
        original_max_position=32,
        beta_fast=4.0,
        attention_factor=1.1,
    )
    attention = LatentAttentionSpec(4, 10, 6, 5, yarn, scale=0.4, query_rank=12)
    experts = MoESpec(8, 3, 12, num_groups=4, top_groups=2, scale=2.5, shared=DenseSpec(12))
    layer = LayerSpec(attention, experts)
    mtp = MTPConfig(
        (layer,) * 3,
        concat="embed_first",
        target_hidden="post",
    )
    # Without the query's rank, but with a window and biases, which no released checkpoint has.
    rope = replace(yarn, truncate=False)
    whole = replace(attention, query_rank=None, rope=rope, bias=True, window=9)
    layers = (LayerSpec(whole, DENSE), layer)
    return replace(model(layers, mtp), tie_embeddings=False)


def glm() -> ModelConfig:
    """Partial rotation, biases, normed queries and keys, a shared expert."""
    attention = AttentionSpec(4, 2, 8, RopeConfig(4, 100.0), qkv_bias=True, qk_norm=True)
    layer = LayerSpec(attention, MoESpec(8, 2, 12, scale=2.5, shared=DenseSpec(12)))
    mtp = MTPConfig((layer,) * 2, concat="embed_first", target_hidden="post")
    return replace(model((LayerSpec(attention, DENSE), layer), mtp), tie_embeddings=False)


def repeated_glm(repeats: int) -> ModelConfig:
    """As GLM is released: with one module, which drafts again on its own output."""
    family = glm()
    assert family.mtp is not None
    return replace(family, mtp=family.mtp.drafting(1).drafting(repeats))
