"""The filters of a row in a kernel: min-p, top-k and top-p, each as a limit below which nothing
is kept.

What a filter keeps are the best tokens of a row, ordered by score and then by id: a limit, a score
and an id, says it all. So nothing is rewritten, and filters combine to the stricter limit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

# Two bits of a limit are found by every pass over the vocabulary: more passes would read more,
# fewer would compute more.
_DIGIT_BITS = 2
# How far below the best score the kept tokens are looked for first.
_WIDTHS = (3.0, 6.0, 10.0, 16.0)
_ZERO = 0.0


class Limit(NamedTuple):
    """Kept are tokens with a key above `key`, and those with this key whose id is below `end`."""

    key: Array  # uint32
    end: Array  # int32

    def keeps(self, keys: Array, ids: Array) -> Array:
        return (keys > self.key) | ((keys == self.key) & (ids < self.end))


class Row(NamedTuple):
    """The processed scores of a row's tokens, read in blocks; all of its tokens, or just the best
    of them, by ascending ids."""

    read: Callable[[Array], tuple[Array, Array]]  # number of a block -> ids, scores
    block: int
    num_blocks: Array | int
    vocab_size: int

    def sums(self, terms: Callable[[Array, Array], tuple[Array, ...]]) -> list[Array]:
        """Sums over the tokens of `terms(ids, scores)`; entries past the last token have -inf."""

        def add(number: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
            new = terms(*self.read(number))
            return tuple(total + term for total, term in zip(totals, new, strict=True))

        ids = jnp.arange(self.block)
        shapes = terms(ids, jnp.zeros(self.block, jnp.float32))
        zeros = tuple(jnp.zeros_like(term) for term in shapes)
        return [jnp.sum(total) for total in lax.fori_loop(0, self.num_blocks, add, zeros)]

    def max(self, value: Callable[[Array, Array], Array], least: float | int) -> Array:
        """The highest of `value(ids, scores)`, or `least`."""

        def raise_to(number: Array, best: Array) -> Array:
            return jnp.maximum(best, value(*self.read(number)))

        like = value(jnp.arange(self.block), jnp.zeros(self.block, jnp.float32))
        start = jnp.full(self.block, least, like.dtype)
        return jnp.max(lax.fori_loop(0, self.num_blocks, raise_to, start))


def ordered_bits(scores: Array) -> Array:
    """Unsigned integers in the order of the scores (zeros of either sign are equal)."""
    bits = lax.bitcast_convert_type(jnp.where(scores == 0, _ZERO, scores), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def best_tokens(row: Row, best: Array, top_k: Array, top_p: Array) -> tuple[Array, Array, Array]:
    """A score that no kept token is below, if some width from the best score down tells: whether it
    does, the score, and the weight (see `filter_limit`) of the tokens below it.

    Without top-k, top-p decides; without both, nothing does.
    """
    by_count = top_k > 0

    def within_widths(ids: Array, scores: Array) -> tuple[Array, ...]:
        weights = jnp.where(by_count, 1.0, jnp.exp(scores - best))
        inside = [jnp.where(scores >= best - width, weights, _ZERO) for width in _WIDTHS]
        return weights, *inside

    total, *masses = row.sums(within_widths)
    target = jnp.where(by_count, top_k.astype(jnp.float32), top_p * total)
    least, mass = best - _WIDTHS[-1], masses[-1]
    found = (by_count | (top_p < 1)) & (mass >= target)
    for width, inside in zip(_WIDTHS[-2::-1], masses[-2::-1], strict=True):
        least = jnp.where(inside >= target, best - width, least)
        mass = jnp.where(inside >= target, inside, mass)
    return found, least, jnp.where(by_count, _ZERO, total - mass)


def filter_limit(
    row: Row, best: Array, below: Array, min_p: Array, top_k: Array, top_p: Array
) -> Limit:
    """What min-p (0: off), then top-k (0: off), then top-p (1: off) leave, each of what the last
    left.

    `best` is the highest score, `below` the sum of exp(score - best) of the tokens that are not in
    `row` but in what top-p chooses from.
    """
    everything = Limit(jnp.uint32(0), jnp.int32(row.vocab_size))
    least = Limit(ordered_bits(best + jnp.log(min_p)), everything.end)
    limit = Limit(*(jnp.where(min_p > 0, *pair) for pair in zip(least, everything, strict=True)))

    def kept_only(limit: Limit, weights: Array, ids: Array, scores: Array) -> Array:
        return jnp.where(limit.keeps(ordered_bits(scores), ids), weights, _ZERO)

    def keep_top_k(limit: Limit) -> Limit:
        def weigh(ids: Array, scores: Array) -> Array:
            return kept_only(limit, jnp.ones_like(scores), ids, scores)

        return _keep_best(row, limit, weigh, top_k.astype(jnp.float32))

    def keep_top_p(limit: Limit) -> Limit:
        def weigh(ids: Array, scores: Array) -> Array:
            return kept_only(limit, jnp.exp(scores - best), ids, scores)

        (total,) = row.sums(lambda ids, scores: (weigh(ids, scores),))
        return _keep_best(row, limit, weigh, top_p * (total + below))

    limit = lax.cond(top_k > 0, keep_top_k, lambda unchanged: unchanged, limit)
    result: Limit = lax.cond(top_p < 1, keep_top_p, lambda unchanged: unchanged, limit)
    return result


def _keep_best(
    row: Row, limit: Limit, weigh: Callable[[Array, Array], Array], target: Array
) -> Limit:
    """The limit of the fewest best tokens whose weights (equal for equal scores, 0 for what `limit`
    does not keep) sum to `target` or more; `limit` if all of them do not.

    The key is found digit by digit, its highest bits first.
    """

    def find_digit(step: Array, cut: Array) -> Array:
        shift = (32 - _DIGIT_BITS - _DIGIT_BITS * step).astype(jnp.uint32)
        trials = [cut | lax.shift_left(jnp.uint32(d), shift) for d in range(1, 1 << _DIGIT_BITS)]

        def from_trial(ids: Array, scores: Array) -> tuple[Array, ...]:
            keys, weights = ordered_bits(scores), weigh(ids, scores)
            return tuple(jnp.where(keys >= trial, weights, _ZERO) for trial in trials)

        digit = sum((mass >= target).astype(jnp.uint32) for mass in row.sums(from_trial))
        return cut | lax.shift_left(digit, shift)

    cut = lax.fori_loop(0, 32 // _DIGIT_BITS, find_digit, jnp.uint32(0))

    def is_tied(ids: Array, scores: Array) -> Array:
        keys = ordered_bits(scores)
        return (keys == cut) & limit.keeps(keys, ids)

    def around_cut(ids: Array, scores: Array) -> tuple[Array, ...]:
        above = jnp.where(ordered_bits(scores) > cut, weigh(ids, scores), _ZERO)
        return above, is_tied(ids, scores).astype(jnp.int32)

    def tied_weight(ids: Array, scores: Array) -> Array:
        return jnp.where(is_tied(ids, scores), weigh(ids, scores), _ZERO)

    above, num_tied = row.sums(around_cut)
    weight, missing = row.max(tied_weight, _ZERO), target - above

    def lowest_ids() -> Array:
        """One past the last of the tied tokens that are needed."""

        def add(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            before, end = carry
            ids, scores = row.read(number)
            tied = is_tied(ids, scores).astype(jnp.int32)
            place = before + jnp.cumsum(tied) - 1
            needed = (tied > 0) & (place * weight < missing)
            end = jnp.maximum(end, jnp.max(jnp.where(needed, ids + 1, 0)))
            return before + jnp.sum(tied), end

        return lax.fori_loop(0, row.num_blocks, add, (jnp.int32(0), jnp.int32(0)))[1]

    needs_all = (num_tied - 1) * weight < missing
    end = lax.cond(needs_all, lambda: limit.end, lowest_ids)
    end = jnp.where((cut > limit.key) & needs_all, row.vocab_size, end)
    is_stricter = cut >= limit.key
    return Limit(jnp.where(is_stricter, cut, limit.key), jnp.where(is_stricter, end, limit.end))
