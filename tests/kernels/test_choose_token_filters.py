"""The filters of the kernel that chooses tokens keep what the sampler's XLA code keeps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mmtp_jax.sampling.filters import filter_scores
from mmtp_jax.sampling.state import RowParams, empty, params_of
from pallas_kernels.choose_token.filters import Row, best_tokens, filter_limit, ordered_bits

V, BLOCK = 300, 64
SIZE = 320  # whole blocks


@jax.jit
def by_xla(scores: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    params: RowParams = params_of(empty(1, V), jnp.zeros(1, jnp.int32))
    params = params._replace(top_k=top_k[None], top_p=top_p[None], min_p=min_p[None])
    return filter_scores(scores[None], params)[0] > -jnp.inf


def row_of(ids: jax.Array, scores: jax.Array) -> Row:
    def read(number: jax.Array) -> tuple[jax.Array, jax.Array]:
        place = number * BLOCK + jnp.arange(BLOCK)
        return ids[place], scores[place]

    return Row(read, BLOCK, SIZE // BLOCK, V)


@jax.jit
def by_limits(
    scores: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What all tokens keep, what the listed ones keep, and whether they were found."""
    all_scores = jnp.full(SIZE, -jnp.inf).at[:V].set(scores)
    every = row_of(jnp.arange(SIZE), all_scores)
    best = every.max(lambda _, values: values, -jnp.inf)
    keys, ids = ordered_bits(scores), jnp.arange(V)
    kept = filter_limit(every, best, jnp.float32(0), min_p, top_k, top_p).keeps(keys, ids)

    found, least, below = best_tokens(every, best, top_k, top_p)
    place = jnp.flatnonzero(all_scores >= least, size=SIZE, fill_value=SIZE - 1)
    listed = row_of(jnp.where(place < V, place, V), all_scores[place])
    limit = filter_limit(listed, best, below, min_p, top_k, top_p)
    return kept, limit.keeps(keys, ids) & (scores >= least), found


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    top_k=st.one_of(st.just(0), st.sampled_from([1, 7, 50, 299, 1000])),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3505, 1e-6]),
    min_p=st.one_of(st.just(0.0), st.sampled_from([0.01, 0.3, 1.0])),
    levels=st.one_of(st.none(), st.sampled_from([1, 4])),
    scale=st.sampled_from([0.3, 2.0, 8.0]),
)
def test_kept_tokens(
    seed: int, top_k: int, top_p: float, min_p: float, levels: int | None, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    if levels is None:
        scores = rng.normal(scale=scale, size=V).astype(np.float32)
    else:  # many ties
        scores = rng.integers(0, levels, V).astype(np.float32) * np.float32(scale)
    k = np.int32(top_k)
    want = np.asarray(by_xla(scores, k, np.float32(top_p), np.float32(min_p)))
    for near in (1 - 1e-5, 1 + 1e-5):  # sums in another order may cut differently next to a limit
        nearby = by_xla(scores, k, np.float32(min(top_p * near, 1)), np.float32(min_p * near))
        if top_p < 1 and not np.array_equal(nearby, want):
            return
    kept, listed, found = by_limits(scores, k, np.float32(top_p), np.float32(min_p))
    np.testing.assert_array_equal(kept, want)
    if found and not min_p:  # the kernel takes min-p's own limit if there is one
        np.testing.assert_array_equal(listed, want)


def test_top_p_of_listed_tokens_counts_the_others() -> None:
    """Nine tenths of the weight, of which the listed tokens have nearly all."""
    for seed in range(20):
        scores = np.random.default_rng(seed).normal(scale=2, size=V).astype(np.float32)
        options = np.int32(0), np.float32(0.9), np.float32(0)
        want = by_xla(scores, *options)
        _, listed, found = by_limits(scores, *options)
        assert found
        np.testing.assert_array_equal(listed, want)


def test_tokens_are_found_within_a_width() -> None:
    """Peaked scores are, flat ones and a top-k of all tokens are not."""
    peaked = np.linspace(0, -100, V, dtype=np.float32)
    for top_k, top_p, expected in [(20, 1.0, True), (0, 0.99, True), (299, 1.0, False)]:
        found = by_limits(peaked, np.int32(top_k), np.float32(top_p), np.float32(0))[2]
        assert found == expected, (top_k, top_p)
    assert not by_limits(peaked, np.int32(0), np.float32(1), np.float32(0))[2]
