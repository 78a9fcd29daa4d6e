"""One step of training: derivatives of the modules' parameters, and what the optimiser makes of
them. The target is frozen.

The trained parameters are float32 ("masters"); the modules compute in the target's dtype. Several
devices each take their own sequences (`shard_map` over the axis "data") and add up derivatives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float32, Int32

from mmtp_jax.models.leaves import Leaf
from mmtp_jax.models.model import Model, ModelGraph, Params
from mmtp_jax.train.chain import module_states, target_states
from mmtp_jax.train.loss import Anchors, Sums, distil
from mmtp_jax.train.options import Objective

DATA_AXIS = "data"

type Masters = tuple[Float32[Array, "..."], ...]


class Batch(NamedTuple):
    """Sequences, and the tokens in them to predict, of each of D devices (see `Anchors`)."""

    tokens: Int32[Array | np.ndarray, "D B S"]
    row: Int32[Array | np.ndarray, "D A"]
    token: Int32[Array | np.ndarray, "D A"]
    at: Int32[Array | np.ndarray, "D A"]


class TrainState(NamedTuple):
    """What changes: the steps taken, the trained parameters, and the optimiser's memory."""

    step: Int32[Array, ""]
    masters: Masters
    optimizer: optax.OptState


def divide(graph: ModelGraph, params: Params) -> tuple[Params, Masters]:
    """The target's parameters, and float32 copies of the modules'."""
    trained = _trained(graph)
    frozen = tuple(value for value, own in zip(params, trained, strict=True) if not own)
    masters = (value for value, own in zip(params, trained, strict=True) if own)
    return frozen, tuple(jnp.array(value, jnp.float32) for value in masters)


def unite(graph: ModelGraph, frozen: Params, masters: Masters) -> Params:
    """All parameters, as the engine takes them: the modules' in the target's dtype."""
    rest, modules = iter(frozen), iter(masters)
    leaves, trained = graph.leaves(), _trained(graph)
    of_target = [leaf for leaf, own in zip(leaves, trained, strict=True) if not own]
    dtype = next(
        value.dtype for leaf, value in zip(of_target, frozen, strict=True) if not leaf.float32
    )
    return tuple(
        next(modules).astype(leaf.dtype(dtype)) if own else next(rest)
        for leaf, own in zip(leaves, trained, strict=True)
    )


def trained_leaves(graph: ModelGraph) -> list[Leaf]:
    """Those of the masters, in their order."""
    return [leaf for leaf, own in zip(graph.leaves(), _trained(graph), strict=True) if own]


def _trained(graph: ModelGraph) -> list[bool]:
    return [leaf.names[0].startswith("mtp.") for leaf in graph.leaves()]


def derivatives(
    graph: ModelGraph, objective: Objective, frozen: Params, masters: Masters, batch: Batch
) -> tuple[Sums, Masters]:
    """Sums over the batch of one device (D = 1), and the derivatives of the summed objective."""
    mtp = graph.config.mtp
    assert mtp is not None
    tokens, anchors = batch.tokens[0], Anchors(batch.row[0], batch.token[0], batch.at[0])
    model: Model = graph.bind(unite(graph, frozen, masters))
    with jax.named_scope("target"):
        raw, normed = target_states(graph, model, tokens)
    feed = raw if mtp.target_hidden == "pre" else normed
    rows, there = anchors.rows_of(mtp.num_modules)

    def states_of(masters: Masters) -> Array:
        model: Model = graph.bind(unite(graph, frozen, masters))
        states = module_states(graph, model, tokens, feed)
        return jax.vmap(lambda own, row: own[row])(states, rows)

    states, pull = jax.vjp(states_of, masters)
    with jax.named_scope("loss"):
        sums, accepted, slope = distil(
            model, objective, states, there, normed[anchors.row], anchors.token
        )
    weights = jnp.asarray(objective.depth_weights(mtp.num_modules))[:, None]
    if objective.reach:
        weights *= 1 - objective.reach + objective.reach * anchors.reached(accepted)
    (found,) = pull(slope * weights[..., None].astype(slope.dtype))
    return sums, found


def train_step(
    graph: ModelGraph,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
) -> Callable[[Params, TrainState, Batch], tuple[TrainState, Sums]]:
    """The compiled step: (target's parameters, state, batch) -> (state, sums). The state is
    donated; derivatives are those of the mean over all tokens of the batch."""

    def on_device(frozen: Params, masters: Masters, batch: Batch) -> tuple[Sums, Masters]:
        found = derivatives(graph, objective, frozen, masters, batch)
        return jax.lax.psum(found, DATA_AXIS)

    everywhere = PartitionSpec()
    spread = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(everywhere, everywhere, PartitionSpec(DATA_AXIS)),
        out_specs=everywhere,
        check_vma=False,
    )

    @functools.partial(jax.jit, donate_argnums=1)
    def step(frozen: Params, state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
        sums, found = spread(frozen, state.masters, batch)
        scale = 1.0 / jnp.maximum(sums.tokens[0], 1.0)
        found = jax.tree.map(lambda value: value * scale, found)
        updates, memory = optimizer.update(found, state.optimizer, state.masters)
        masters = optax.apply_updates(state.masters, updates)
        return TrainState(state.step + 1, masters, memory), sums

    return step
