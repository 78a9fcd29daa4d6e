"""Teacher-forced states of target and modules are those of the oracle, for every family."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.families import deepseek, glm, inkling, inkling_shared_norm, mimo_v2, step
from engine.models import VOCAB, chain, chain_pre, hybrid, random_values, target_fed
from flax import nnx
from oracle import Oracle

from mmtp_jax.models.model import assemble, model_graph
from mmtp_jax.models.mtp import runs
from mmtp_jax.specs import ModelConfig
from mmtp_jax.speculative.module import module_logits
from mmtp_jax.train.chain import module_states, target_states
from mmtp_jax.train.options import PAGE

TOLERANCE = 5e-5


def text(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng([seed, length]).integers(0, VOCAB, length).astype(np.int32)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: chain(3), id="chain"),
        pytest.param(lambda: chain_pre(2), id="chain_pre"),
        pytest.param(lambda: target_fed(2), id="target_fed"),
        pytest.param(hybrid, id="hybrid"),
        pytest.param(inkling, id="inkling"),
        # What these have beside the others is little.
        pytest.param(inkling_shared_norm, id="shared_norm", marks=SLOW),
        pytest.param(mimo_v2, id="mimo_v2", marks=SLOW),
        pytest.param(step, id="step", marks=SLOW),
        pytest.param(deepseek, id="deepseek", marks=SLOW),
        pytest.param(glm, id="glm", marks=SLOW),
    ],
)
def test_states_are_those_of_the_oracle(build: Callable[[], ModelConfig]) -> None:
    config = build()
    assert config.mtp is not None
    graph = model_graph(config)
    values = random_values(graph)
    params = assemble(graph, values)
    texts = np.stack([text(seed, PAGE) for seed in range(2)])

    @jax.jit
    def run(params: tuple[jax.Array, ...], tokens: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        model = graph.bind(params)
        raw, normed = target_states(graph, model, tokens)
        feed = raw if config.mtp.target_hidden == "pre" else normed
        states = module_states(graph, model, tokens, feed)
        modules = [
            nnx.merge(module_graph, jax.tree.map(lambda leaf, depth=depth: leaf[depth], leaves))
            for (_, count), stacked in zip(runs(config.mtp), model.mtp.runs, strict=True)
            for module_graph, leaves in [nnx.split(stacked)]
            for depth in range(count)
        ]
        logits = [module_logits(model, *pair) for pair in zip(modules, states, strict=True)]
        return model.target.logits(normed), logits

    target, modules = run(params, jnp.asarray(texts))
    for index, tokens in enumerate(texts):
        rows = slice(index * PAGE, (index + 1) * PAGE)
        trace = Oracle(config, values).trace(tokens.tolist())
        _same(target[rows], trace.logits)
        for number, (found, module) in enumerate(zip(modules, trace.modules, strict=True)):
            _same(found[rows][: PAGE - 1 - number], module.logits)


def _same(found: jax.Array, wanted: np.ndarray) -> None:
    assert found.shape == wanted.shape
    error = np.max(np.abs(np.asarray(found, np.float64) - wanted))
    assert error <= TOLERANCE * max(1.0, np.max(np.abs(wanted)))
