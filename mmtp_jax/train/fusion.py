"""A first guess of what a module does with its two inputs, by linear regression.

A module begins as a copy of the target's last layer. At position q + 1 the target gives that layer
what all layers before made of the text; a module at position q has the hidden state after them at q
and the next token instead. The projection in front of the module that comes closest to the former,
linearly and in the mean, is a matter of normal equations: a copied layer and a copied head behind
it then draft well before any training.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from mmtp_jax.models.model import ModelGraph, Params, assemble, model_graph
from mmtp_jax.train.batches import padded_length
from mmtp_jax.train.chain import target_states
from mmtp_jax.train.options import BatchOptions
from mmtp_jax.train.shards import Dataset

# Of the mean square of the inputs; keeps directions that the samples hardly have at zero.
_RIDGE = 1e-4
# Tokens of a sample at most, so that all batches are of one shape and have one program.
_LONGEST = 256


def fitted_fusions(
    graph: ModelGraph,
    params: Params,
    data: Dataset,
    chosen: Sequence[int] | np.ndarray,
    options: BatchOptions,
) -> tuple[Float32[np.ndarray, "inputs H"], Float32[np.ndarray, "inputs H"]]:
    """Projections of [hidden, embedding], both divided by their root mean square, for hidden states
    before the target's final norm and after it, from the first tokens of the chosen samples."""
    shorter = model_graph(replace(graph.config, layers=graph.config.layers[:-1]))
    values = graph.values(params)
    below = assemble(shorter, values.__getitem__)
    size = graph.config.hidden_size
    products = [jnp.zeros((2 * size, 3 * size), jnp.float32) for _ in range(2)]
    add = jax.jit(functools.partial(_add, graph, shorter), donate_argnums=2)
    texts = [data.tokens(sample)[:_LONGEST] for sample in chosen]
    length = padded_length(max(map(len, texts)))
    sequences = min(max(options.batch_tokens // length, 1), len(texts))
    for part in itertools.batched(texts, sequences):
        tokens, lengths = np.zeros((sequences, length), np.int32), np.zeros(sequences, np.int32)
        for place, text in enumerate(part):
            tokens[place, : len(text)] = text
            lengths[place] = len(text)
        products = add(params, below, products, tokens, lengths)
    pre, post = (_solved(np.asarray(product, np.float64)) for product in products)
    return pre, post


def _add(
    graph: ModelGraph,
    shorter: ModelGraph,
    params: Params,
    below: Params,
    products: list[Float32[Array, "inputs both"]],
    tokens: Int32[Array, "B S"],
    lengths: Int32[Array, " B"],
) -> list[Float32[Array, "inputs both"]]:
    """Both normal equations, with the products of a batch added."""
    model = graph.bind(params)
    raw, normed = target_states(graph, model, tokens)
    wanted, _ = target_states(shorter, shorter.bind(below), tokens)
    embedded = model.target.embedded(tokens.reshape(-1), norm=False)

    def pairs(array: Array, first: int) -> Array:
        by_text = array.reshape(*tokens.shape, -1)[:, first : tokens.shape[1] - 1 + first]
        return by_text.reshape(-1, array.shape[1]).astype(jnp.float32)

    there = jnp.arange(tokens.shape[1] - 1) + 1 < lengths[:, None]
    weight = there.reshape(-1, 1).astype(jnp.float32)
    after, token = pairs(wanted, 1), _divided(pairs(embedded, 1), graph.config.norm_eps)
    added = []
    for product, hidden in zip(products, (raw, normed), strict=True):
        before = _divided(pairs(hidden, 0), graph.config.norm_eps)
        inputs = weight * jnp.concatenate([before, token], axis=1)
        both = jnp.concatenate([inputs, weight * after], axis=1)
        added.append(product + jnp.matmul(inputs.T, both, precision="highest"))
    return added


def _divided(x: Float[Array, "T H"], eps: float) -> Float[Array, "T H"]:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + eps)


def _solved(product: np.ndarray) -> Float32[np.ndarray, "inputs H"]:
    count = product.shape[0]
    square, mixed = product[:, :count], product[:, count:]
    ridge = _RIDGE * np.trace(square) / count * np.eye(count)
    return np.linalg.solve(square + ridge, mixed).astype(np.float32)
