"""Small models for engine tests."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mmtp_jax.models.model import ModelGraph
from mmtp_jax.specs import (
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    LogScaling,
    ModelConfig,
    MoESpec,
    MTPConfig,
    RopeConfig,
)

VOCAB = 48
HIDDEN = 16
ROPE = RopeConfig(8, theta=100.0)
GLOBAL = LayerSpec(AttentionSpec(4, 2, 8, ROPE), DenseSpec(24))
SLIDING = LayerSpec(AttentionSpec(2, 1, 8, ROPE, window=5), DenseSpec(24))
SLIDING_CONV = replace(SLIDING, conv_taps=4)


def random_values(graph: ModelGraph) -> Callable[[str], np.ndarray]:
    """Random float32 values by flat name, distributed like those of `load_format="dummy"`, for
    which a program is compiled for every size."""
    leaves = {piece.name: (leaf, piece.shape) for leaf in graph.leaves() for piece in leaf.pieces}

    def value(name: str) -> np.ndarray:
        leaf, shape = leaves[name]
        noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
        return (leaf.mean + leaf.std * noise).astype(np.float32)

    return value


def model(
    layers: tuple[LayerSpec, ...], mtp: MTPConfig | None, *, max_position: int = 256
) -> ModelConfig:
    return ModelConfig("test", VOCAB, HIDDEN, layers, max_position, tie_embeddings=True, mtp=mtp)


def chain(num_modules: int) -> ModelConfig:
    """Equal modules in MiMo-7B's wiring."""
    return model((GLOBAL, GLOBAL), MTPConfig((GLOBAL,) * num_modules))


def chain_pre(num_modules: int) -> ModelConfig:
    """Step-3.5's wiring: embedding first, pre-norm feed, own heads, zero-centred norms."""
    mtp = MTPConfig(
        (SLIDING,) * num_modules,
        concat="embed_first",
        feed="chain_pre",
        own_head=True,
        zero_first_embedding=False,
    )
    return replace(model((GLOBAL,), mtp), norm_style="one_plus", tie_embeddings=False)


def target_fed(num_modules: int) -> ModelConfig:
    """MiMo-V2's wiring: every module sees the target's normed hidden state."""
    mtp = MTPConfig(
        (SLIDING,) * num_modules, concat="embed_first", target_hidden="post", feed="target"
    )
    return model((GLOBAL,), mtp)


def hybrid() -> ModelConfig:
    """A global and a sliding layer with different heads, a convolution, two unequal modules."""
    return model((GLOBAL, SLIDING_CONV), MTPConfig((SLIDING_CONV, GLOBAL), norm="none"))


def narrow(num_modules: int) -> ModelConfig:
    """Windows and convolutions that see fewer positions than the modules rewrite."""
    spec = LayerSpec(AttentionSpec(2, 1, 8, ROPE, window=2), DenseSpec(24), conv_taps=4)
    return model((GLOBAL,), MTPConfig((spec,) * num_modules))


def repeated(repeats: int) -> ModelConfig:
    """A lone module that drafts several tokens, with options that no family's modules have."""
    attention = AttentionSpec(
        2,
        1,
        8,
        RopeConfig(8, theta=100.0, scaling="linear", factor=2.0),
        window=5,
        output_bias=True,
        log_scaling=LogScaling(4, alpha=0.5),
    )
    experts = MoESpec(6, 2, 12, selection_bias=False, normalize=False)
    module = LayerSpec(attention, experts, conv_taps=4)
    return model((GLOBAL,), MTPConfig((module,), repeats=repeats))


def plain() -> ModelConfig:
    return model((GLOBAL, SLIDING), None)
