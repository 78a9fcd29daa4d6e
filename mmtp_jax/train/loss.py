"""Distillation: every module learns the target's own distribution of the token it predicts.

The target's logits at the position before a token are what the engine draws it from, so the best
draft is drawn from the same distribution (MTP-D, arXiv 2603.23911). Logits of a whole batch and all
modules would take tens of gigabytes: they exist for some anchors and one module at a time, and so
do their derivatives, which are needed with respect to the modules' states only (the head is the
target's and stays as it is).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from mmtp_jax.models.model import Model
from mmtp_jax.train.options import Objective

# Anchors whose logits exist at once.
ANCHORS_AT_ONCE = 1024

# Of an overlap whose logarithm is taken.
_LEAST = 1e-9


class Anchors(NamedTuple):
    """Tokens to predict: the row of the position before each, the token, and how many tokens come
    before it in its sequence (0: padding, nothing to predict).
    """

    row: Int32[Array, " A"]
    token: Int32[Array, " A"]
    at: Int32[Array, " A"]

    def rows_of(self, num_modules: int) -> tuple[Int32[Array, "N A"], Bool[Array, "N A"]]:
        """The row from which each module predicts each token, and whether it lies in its
        sequence."""
        back = 1 + jnp.arange(num_modules, dtype=jnp.int32)[:, None]
        there = self.at - 1 - back >= 0
        return jnp.where(there, self.row - back, 0), there

    def reached(self, accepted: Float32[Array, "N A"]) -> Float32[Array, "N A"]:
        """How likely a verification comes to each module's draft of each token, if each draft is
        accepted with this probability: from one row, module m drafts the token after module m - 1's
        (0 where that one is no anchor: no verification begins in a prompt)."""
        follows = (self.at[1:] == self.at[:-1] + 1) & (self.row[1:] == self.row[:-1] + 1)
        reached = [jnp.ones_like(accepted[0])]
        for own in accepted[:-1]:
            through = jnp.where(follows, (reached[-1] * own)[:-1], 0.0)
            reached.append(jnp.pad(through, (1, 0)))
        return jnp.stack(reached)


class Sums(NamedTuple):
    """Per module, over the tokens that it predicts: how many, the objective, the divergence, how
    often both best tokens agree, and how likely a draft drawn from one distribution is accepted by
    the other (the sum of the smaller probabilities; arXiv 2211.17192, section 3.2)."""

    tokens: Float32[Array, " N"]
    loss: Float32[Array, " N"]
    divergence: Float32[Array, " N"]
    agreement: Float32[Array, " N"]
    overlap: Float32[Array, " N"]


def distil(
    model: Model,
    objective: Objective,
    states: Float[Array, "N A H"],
    there: Bool[Array, "N A"],
    target: Float[Array, "A H"],
    token: Int32[Array, " A"],
) -> tuple[Sums, Float32[Array, "N A"], Float[Array, "N A H"]]:
    """The sums, how likely each draft is accepted, and the derivatives of each module's objective
    at each anchor by its `states`.

    `target` are the target's final states from which the tokens are drawn.
    """
    num_anchors = token.shape[0]
    size = min(ANCHORS_AT_ONCE, num_anchors)
    if num_anchors % size:
        raise ValueError(f"anchors must be a multiple of {size}, got {num_anchors}")

    def chunked(array: Array) -> Array:
        """[N, A, ...] -> [chunks, N, size, ...]"""
        split = array.reshape(array.shape[0], -1, size, *array.shape[2:])
        return jnp.moveaxis(split, 1, 0)

    def whole(array: Array) -> Array:
        """The inverse of `chunked`."""
        joined = jnp.moveaxis(array, 0, 1)
        return joined.reshape(joined.shape[0], num_anchors, *joined.shape[3:])

    def of_chunk(chunk: tuple[Array, ...]) -> tuple[Sums, Array, Array]:
        states, there, target, token = chunk
        wanted = _Wanted.by(model, objective, target[0], token[0])
        return jax.lax.map(
            lambda pair: _of_module(model, objective, wanted, *pair), (states, there)
        )

    chunks = (chunked(states), chunked(there), chunked(target[None]), chunked(token[None]))
    sums, accepted, derivatives = jax.lax.map(of_chunk, chunks)
    added = jax.tree.map(lambda values: jnp.sum(values, axis=0), sums)
    return added, whole(accepted), whole(derivatives)


class _Wanted(NamedTuple):
    """What modules should draft for some anchors: the target's distribution, with its entropy and
    its best token, and the token that the text has there."""

    probability: Float32[Array, "A V"]
    entropy: Float32[Array, " A"]
    best: Int32[Array, " A"]
    token: Int32[Array, " A"]

    @staticmethod
    def by(
        model: Model, objective: Objective, target: Float[Array, "A H"], token: Int32[Array, " A"]
    ) -> _Wanted:
        logits = model.target.logits(target)
        if objective.top_k:
            least = jax.lax.top_k(logits, objective.top_k)[0][:, -1:]
            logits = jnp.where(logits >= least, logits, -jnp.inf)
        probability = jax.nn.softmax(logits)
        entropy = -jnp.sum(jax.scipy.special.xlogy(probability, probability), axis=1)
        return _Wanted(probability, entropy, jnp.argmax(logits, axis=1).astype(jnp.int32), token)


def _of_module(
    model: Model,
    objective: Objective,
    wanted: _Wanted,
    states: Float[Array, "A H"],
    there: Bool[Array, " A"],
) -> tuple[Sums, Float32[Array, " A"], Float[Array, "A H"]]:
    """One module's sums, how likely its drafts are accepted, and the derivatives of its
    objective."""
    got = jax.nn.log_softmax(model.target.logits(states))
    drafted = jnp.exp(got)
    true = wanted.token[:, None] == jnp.arange(got.shape[1])
    divergence = -wanted.entropy - jnp.sum(wanted.probability * got, axis=1)
    surprise = -jnp.sum(jnp.where(true, got, 0.0), axis=1)
    accepted = jnp.sum(jnp.minimum(wanted.probability, drafted), axis=1)
    value = objective.distill * divergence + objective.cross_entropy * surprise
    # By the logits, both terms have the derivative "what is drafted less what is wanted".
    slope = objective.distill * (drafted - wanted.probability)
    slope += objective.cross_entropy * (drafted - true)
    if objective.overlap:
        some = jnp.maximum(accepted, _LEAST)
        value -= objective.overlap * jnp.log(some)
        # Only what is drafted less often than wanted adds to the overlap when it is drafted more.
        short = jnp.where(drafted < wanted.probability, drafted, 0.0)
        gained = short - drafted * jnp.sum(short, axis=1, keepdims=True)
        slope -= objective.overlap * gained / some[:, None]
    agreed = (jnp.argmax(got, axis=1) == wanted.best).astype(jnp.float32)
    each = (jnp.ones_like(value), value, divergence, agreed, accepted)
    # In the states' dtype, as all that follows: a product of float32 takes twice as long.
    _, pull = jax.vjp(lambda states: model.target.logits(states, states.dtype), states)
    (derivatives,) = pull(jnp.where(there[:, None], slope, 0.0).astype(states.dtype))
    sums = Sums(*(jnp.sum(jnp.where(there, one, 0.0)) for one in each))
    return sums, accepted, derivatives
