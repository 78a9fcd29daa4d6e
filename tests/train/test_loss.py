"""Sums and derivatives of a training step, against one plain expression that jax differentiates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.models import VOCAB, chain, random_values

from mmtp_jax.checks import ConfigError
from mmtp_jax.models.model import ModelGraph, Params, assemble, model_graph
from mmtp_jax.train import loss
from mmtp_jax.train.chain import module_states, target_states
from mmtp_jax.train.options import PAGE, Objective
from mmtp_jax.train.step import Batch, Masters, derivatives, divide, unite

MODULES = 2


def built() -> tuple[ModelGraph, Params]:
    graph = model_graph(chain(MODULES))
    return graph, assemble(graph, random_values(graph))


def batch(seed: int = 0) -> Batch:
    """Two sequences; of each the tokens from index 2, where only the first module has a row, to 6,
    and padding."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (2, PAGE)).astype(np.int32)
    places = [(owner, index) for owner in range(2) for index in (2, 3, 4, 5, 6)]
    row = [owner * PAGE + index - 1 for owner, index in places]
    token = [tokens[place] for place in places]
    index = [index for _, index in places]
    padding = -len(places) % 8
    arrays = [np.pad(np.array(array, np.int32), (0, padding)) for array in (row, token, index)]
    return Batch(*(array[None] for array in (tokens, *arrays)))


def plain(
    graph: ModelGraph, objective: Objective, frozen: Params, masters: Masters, batch: Batch
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The weighted sum over depths, and each depth's sums."""
    model = graph.bind(unite(graph, frozen, masters))
    tokens = jnp.asarray(batch.tokens[0])
    raw, normed = target_states(graph, model, tokens)
    states = module_states(graph, model, tokens, raw)
    logits = model.target.logits(normed).reshape(*tokens.shape, VOCAB)
    found: dict[str, list[jax.Array]] = {name: [] for name in loss.Sums._fields}
    weights = objective.decay ** jnp.arange(MODULES)
    total = jnp.float32(0)
    accepted: dict[tuple[int, int, int], jax.Array] = {}
    for number in range(MODULES):
        drafted = model.target.logits(states[number]).reshape(*tokens.shape, VOCAB)
        sums = dict.fromkeys(found, jnp.float32(0))
        for row, token, index in zip(batch.row[0], batch.token[0], batch.at[0], strict=True):
            owner, at = int(row) // PAGE, int(index)
            if at - 2 - number < 0:
                continue
            wanted = logits[owner, at - 1]
            if objective.top_k:
                least = jnp.sort(wanted)[-objective.top_k]
                wanted = jnp.where(wanted >= least, wanted, -1e9)
            p, q = jax.nn.softmax(wanted), jax.nn.softmax(drafted[owner, at - 2 - number])
            divergence = jnp.sum(p * (jnp.log(jnp.maximum(p, 1e-30)) - jnp.log(q)))
            surprise = -jnp.log(q[token])
            overlap = jnp.sum(jnp.minimum(p, q))
            value = objective.distill * divergence + objective.cross_entropy * surprise
            value -= objective.overlap * jnp.log(overlap)
            # Of the drafts from the same row, those before.
            reached = jnp.float32(1)
            for before in range(number):
                reached *= accepted.get((before, owner, at - number + before), 0.0)
            accepted[number, owner, at] = jax.lax.stop_gradient(overlap)
            share = 1 - objective.reach + objective.reach * reached
            total += weights[number] * share * value / jnp.sum(weights)
            sums["tokens"] += 1
            sums["divergence"] += divergence
            sums["loss"] += value
            sums["agreement"] += jnp.argmax(p) == jnp.argmax(q)
            sums["overlap"] += overlap
        for name, value in sums.items():
            found[name].append(value)
    return total, {name: jnp.stack(values) for name, values in found.items()}


@pytest.mark.parametrize(
    "objective",
    [Objective(), Objective(0.7, 0.3, 0.5, 5), Objective(0.2, overlap=1.5, reach=0.7)],
    ids=["distill", "mixed", "accepted"],
)
def test_sums_and_derivatives(objective: Objective, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "ANCHORS_AT_ONCE", 8)
    graph, params = built()
    frozen, masters = divide(graph, params)
    on_device = jax.tree.map(jnp.asarray, batch())
    sums, found = derivatives(graph, objective, frozen, masters, on_device)
    (_, wanted), slopes = jax.jit(
        jax.value_and_grad(
            lambda masters: plain(graph, objective, frozen, masters, batch()), has_aux=True
        )
    )(masters)
    for name, values in sums._asdict().items():
        np.testing.assert_allclose(values, wanted[name], rtol=1e-4, err_msg=name)
    for own, slope in zip(found, slopes, strict=True):
        scale = float(jnp.max(jnp.abs(slope)))
        assert scale > 0
        np.testing.assert_allclose(own, slope, atol=2e-4 * scale, rtol=1e-3)


def test_a_draft_is_reached_through_those_before_it() -> None:
    # Two texts of three and two tokens, whose first tokens follow prompts, and padding.
    anchors = loss.Anchors(
        row=jnp.array([4, 5, 6, 67, 68, 0]),
        token=jnp.zeros(6, jnp.int32),
        at=jnp.array([5, 6, 7, 4, 5, 0]),
    )
    accepted = jnp.array([[0.5, 0.25, 0.3, 0.2, 0.9, 0.7], [0.1, 0.4, 0.3, 0.2, 0.9, 0.7]] * 2)
    reached = anchors.reached(accepted[:3])
    np.testing.assert_allclose(reached[0], np.ones(6))
    np.testing.assert_allclose(reached[1], [0, 0.5, 0.25, 0, 0.2, 0])
    np.testing.assert_allclose(reached[2], [0, 0, 0.5 * 0.4, 0, 0, 0], rtol=1e-6)


def test_uniting_gives_back_what_was_divided() -> None:
    graph, params = built()
    again = unite(graph, *divide(graph, params))
    for one, other in zip(params, again, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distill": -1.0}, "distill must be >= 0"),
        ({"distill": 0.0, "overlap": 0.0}, "must not all be 0"),
        ({"overlap": -1.0}, "overlap must be >= 0"),
        ({"reach": 1.5}, r"reach must be in \[0, 1\]"),
        ({"decay": 0.0}, r"decay must be in \(0, 1\]"),
        ({"top_k": -1}, "top_k must be >= 0"),
    ],
)
def test_refused_objectives(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Objective(**options)
