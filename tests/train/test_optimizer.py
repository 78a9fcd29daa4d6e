"""The optimisers: which arrays hold matrices, and what a step of Muon is."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from engine.models import GLOBAL, chain, model, repeated

from mmtp_jax.models.model import model_graph
from mmtp_jax.specs import ModelConfig, MTPConfig
from mmtp_jax.train.optimizer import _matrix, optimizer_for
from mmtp_jax.train.options import FitOptions
from mmtp_jax.train.step import trained_leaves

RATE = 1e-3
OPTIONS = FitOptions(
    optimizer="muon", learning_rate=RATE, warmup=0, weight_decay=0.0, clip=1e9, final_rate=1.0
)


def with_biases(num_modules: int) -> ModelConfig:
    """Modules whose projections of queries, keys and values have a joined bias."""
    layer = replace(GLOBAL, attention=replace(GLOBAL.attention, qkv_bias=True))
    return model((GLOBAL,), MTPConfig((layer,) * num_modules))


@pytest.mark.parametrize("config", [chain(2), with_biases(2), repeated(2)])
def test_matrices_have_inputs_and_outputs(config: ModelConfig) -> None:
    for leaf in trained_leaves(model_graph(config)):
        matrix, last = _matrix(leaf), leaf.names[0].rpartition(".")[2]
        assert (matrix is not None) == (last in ("kernel", "gate", "down")), leaf.names
        if matrix is not None:
            inputs = 2 if leaf.axes[1] == "experts" else 1
            assert matrix == (inputs, len(leaf.shape) - 1), leaf.names


def test_muon_takes_steps_with_equal_singular_values() -> None:
    """And of AdamW's size; what is no matrix takes AdamW's own."""
    graph = model_graph(chain(2))
    leaves = trained_leaves(graph)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    found = tuple(
        jax.random.normal(key, leaf.shape, jnp.float32)
        for key, leaf in zip(keys, leaves, strict=True)
    )

    def of(optimizer: optax.GradientTransformation) -> tuple:
        return jax.jit(optimizer.update)(found, optimizer.init(found), found)[0]

    adamw = of(optax.adamw(RATE, b2=0.95, weight_decay=0.0, nesterov=True))
    for leaf, update, slope, other in zip(
        leaves, of(optimizer_for(graph, OPTIONS, 10)), found, adamw, strict=True
    ):
        if _matrix(leaf) is None:
            np.testing.assert_allclose(update, other, rtol=1e-5)
            continue
        matrices = np.moveaxis(np.asarray(update), 1, -2)
        values = np.linalg.svd(matrices, compute_uv=False)
        # Five steps of Newton-Schulz bring them between 0.7 and 1.2 (Jordan et al. 2024).
        wanted = RATE * 0.2 * max(matrices.shape[-2:]) ** 0.5
        assert (values > 0.6 * wanted).all() and (values < 1.3 * wanted).all(), leaf.names
        assert float(np.sum(np.asarray(update) * np.asarray(slope))) < 0
