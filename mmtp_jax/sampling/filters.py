"""The filters of sampling: min-p, top-k and top-p, in vLLM's order, without sorting.

Dims: S rows of a step, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float32, Int32, UInt32

from mmtp_jax.sampling.processors import apply_if
from mmtp_jax.sampling.state import RowParams


def filter_scores(scores: Float32[Array, "S V"], params: RowParams) -> Float32[Array, "S V"]:
    """Set to -inf what min-p, then top-k, then top-p removes, each from what the last left.

    `scores` are processed logits, already divided by the temperature. At least one token of a row
    stays. A step none of whose rows uses a filter does not run it.
    """

    def min_p(scores: Float32[Array, "S V"]) -> Float32[Array, "S V"]:
        least = jnp.max(scores, axis=1, keepdims=True) + jnp.log(params.min_p)[:, None]
        return jnp.where(scores < least, -jnp.inf, scores)

    def top_k(scores: Float32[Array, "S V"]) -> Float32[Array, "S V"]:
        wanted = params.top_k > 0
        kept = keep_best(scores, jnp.ones_like(scores), params.top_k.astype(jnp.float32))
        return jnp.where(kept | ~wanted[:, None], scores, -jnp.inf)

    def top_p(scores: Float32[Array, "S V"]) -> Float32[Array, "S V"]:
        wanted = params.top_p < 1
        kept = keep_best(scores, jax.nn.softmax(scores), params.top_p)
        return jnp.where(kept | ~wanted[:, None], scores, -jnp.inf)

    scores = apply_if(params.min_p > 0, min_p, scores)
    scores = apply_if(params.top_k > 0, top_k, scores)
    return apply_if(params.top_p < 1, top_p, scores)


def keep_best(
    scores: Float32[Array, "S V"], weights: Float32[Array, "S V"], target: Float32[Array, " S"]
) -> Bool[Array, "S V"]:
    """The fewest best scores whose weights (equal for equal scores) sum to `target` or more.

    Among scores equal to the last one kept the lowest ids win, as in argmax: with weights 1 exactly
    `target` tokens stay, and keeping one token is greedy. Everything stays if the sum falls short.

    The cut is found bit by bit in 32 sums, which is cheaper than sorting the vocabulary. On a GPU
    the loop is unrolled, since a loop would keep the step out of a CUDA graph; elsewhere it is not,
    since unrolling takes seconds to compile.
    """
    keys = _ordered_bits(scores)

    def search(target: Float32[Array, " S"], unroll: bool) -> UInt32[Array, " S"]:
        """The highest key such that the weights from there on reach the target."""

        def try_bit(step: Int32[Array, ""] | int, cut: UInt32[Array, " S"]) -> UInt32[Array, " S"]:
            trial = cut | (jnp.uint32(1 << 31) >> jnp.asarray(step, jnp.uint32))
            mass = jnp.sum(jnp.where(keys >= trial[:, None], weights, 0), axis=1)
            return jnp.where(mass >= target, trial, cut)

        start = jnp.zeros_like(target, jnp.uint32)
        cut: Array = lax.fori_loop(0, 32, try_bit, start, unroll=unroll)
        return cut

    cut: Array = lax.platform_dependent(
        target, cuda=partial(search, unroll=True), default=partial(search, unroll=False)
    )
    above = keys > cut[:, None]
    tied = keys == cut[:, None]
    missing = target - jnp.sum(jnp.where(above, weights, 0), axis=1)
    before = jnp.cumsum(tied, axis=1, dtype=jnp.int32) - 1
    kept: Array = above | (tied & (before * weights < missing[:, None]))
    return kept


def _ordered_bits(scores: Float32[Array, "S V"]) -> UInt32[Array, "S V"]:
    """Unsigned integers in the order of the scores (zeros of either sign are equal)."""
    bits = lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)
