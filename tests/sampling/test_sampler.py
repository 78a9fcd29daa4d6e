"""The sampler: greedy rows, invariance to everything but the request, NaN, log-probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling.reference import int32, make_state

from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.sampling.sampler import gumbel_noise, logprobs, sample
from mmtp_jax.sampling.state import SamplingState

V, L = 16, 12
REQUESTS = [
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7, top_p=0.8, seed=12),
    SamplingParams(temperature=1.5, top_k=5, seed=13),
    SamplingParams(temperature=1.0, min_p=0.05, repetition_penalty=1.3, seed=14),
    SamplingParams(temperature=0, frequency_penalty=0.8, presence_penalty=0.2),
    SamplingParams(logit_bias={3: 4.0}, banned_token_ids=[5], seed=15),
    SamplingParams(min_tokens=5, stop_token_ids=[2, 7], seed=2**32 - 1),
]
R = len(REQUESTS)

run = jax.jit(sample)


def batch(
    rows_per_slot: int = 4,
) -> tuple[jax.Array, SamplingState, jax.Array, jax.Array, jax.Array]:
    """Logits, state, slot, index and history: some consecutive rows for every request."""
    random = np.random.default_rng(5)
    slot = np.repeat(np.arange(R), rows_per_slot)
    index = 4 + np.tile(np.arange(rows_per_slot), R)
    logits = random.normal(scale=2.0, size=(R * rows_per_slot, V))
    history = random.integers(0, V, (R, L))
    return (
        jnp.asarray(logits, jnp.float32),
        make_state(REQUESTS, V, prompt_lens=3),
        jnp.asarray(slot, jnp.int32),
        jnp.asarray(index, jnp.int32),
        jnp.asarray(history, jnp.int32),
    )


def test_greedy_takes_the_best_token_and_the_lowest_id_of_a_tie() -> None:
    state = make_state([SamplingParams(temperature=0)], 4)
    logits = jnp.array([[1, 3, 3, 0], [-jnp.inf, -5, -9, -jnp.inf]], jnp.float32)
    tokens = run(logits, state, int32(0, 0), int32(1, 2), jnp.zeros((1, 4), jnp.int32))
    assert tokens.dtype == jnp.int32
    assert tokens.tolist() == [1, 1]


def test_top_k_of_one_is_greedy_even_in_ties() -> None:
    logits = jnp.asarray(np.random.default_rng(0).integers(0, 3, (64, V)), jnp.float32)
    slot, index = jnp.zeros(64, jnp.int32), jnp.arange(64, dtype=jnp.int32)
    history = jnp.zeros((1, 64), jnp.int32)
    for params in (
        SamplingParams(top_k=1),
        SamplingParams(top_p=1e-6),
        SamplingParams(top_p=1e-60),
    ):
        tokens = run(logits, make_state([params], V), slot, index, history)
        assert np.array_equal(tokens, jnp.argmax(logits, axis=1))


def test_greedy_and_neutral_options_do_not_depend_on_the_seed() -> None:
    logits, _, slot, index, history = batch()
    texts = [
        run(
            logits, make_state([SamplingParams(temperature=0, seed=s)] * R, V), slot, index, history
        )
        for s in (0, 1)
    ]
    assert np.array_equal(*texts)
    assert np.array_equal(texts[0], jnp.argmax(logits, axis=1))


@pytest.mark.parametrize("size", [1, 3, 32])
def test_tokens_do_not_depend_on_the_number_of_rows(size: int) -> None:
    logits, state, slot, index, history = batch()
    whole = run(logits, state, slot, index, history)
    for start in range(0, len(slot) - size + 1, size):
        part = slice(start, start + size)
        tokens = run(logits[part], state, slot[part], index[part], history)
        assert np.array_equal(tokens, whole[part])


def test_tokens_do_not_depend_on_neighbours() -> None:
    logits, state, slot, index, history = batch()
    whole = run(logits, state, slot, index, history)
    for own in range(R):
        others = [
            params if r == own else SamplingParams(temperature=0)
            for r, params in enumerate(REQUESTS)
        ]
        alone = run(logits, make_state(others, V, prompt_lens=3), slot, index, history)
        rows = np.asarray(slot) == own
        assert np.array_equal(alone[rows], whole[rows]), REQUESTS[own]


def test_tokens_do_not_depend_on_the_order_of_rows_or_the_number_of_the_slot() -> None:
    logits, state, slot, index, history = batch()
    whole = run(logits, state, slot, index, history)
    order = np.random.default_rng(1).permutation(len(slot))
    shuffled = run(logits[order], state, slot[order], index[order], history)
    assert np.array_equal(shuffled, whole[order])

    place = np.random.default_rng(2).permutation(R)  # request r moves to slot place[r]
    back = np.argsort(place)
    moved = jax.tree.map(lambda leaf: leaf[back], state)
    tokens = run(logits, moved, jnp.asarray(place, jnp.int32)[slot], index, history[back])
    assert np.array_equal(tokens, whole)


def test_padding_rows_change_nothing() -> None:
    logits, state, slot, index, history = batch()
    whole = run(logits, state, slot, index, history)
    padding = 8
    padded = run(
        jnp.concatenate([logits, jnp.full((padding, V), jnp.nan)]),
        state,
        jnp.concatenate([slot, jnp.arange(R, R + padding, dtype=jnp.int32)]),
        jnp.concatenate([index, jnp.full(padding, -(2**31), jnp.int32)]),
        history,
    )
    assert np.array_equal(padded[: len(slot)], whole)


def test_tokens_depend_on_seed_and_index() -> None:
    flat = jnp.zeros((64, V), jnp.float32)
    history = jnp.zeros((2, 64), jnp.int32)
    state = make_state([SamplingParams(seed=1), SamplingParams(seed=2)], V)
    index = jnp.arange(64, dtype=jnp.int32)
    first = run(flat, state, jnp.zeros(64, jnp.int32), index, history)
    second = run(flat, state, jnp.ones(64, jnp.int32), index, history)
    assert not np.array_equal(first, second)
    assert len(set(first.tolist())) > V // 2


def test_rows_of_one_index_share_their_noise() -> None:
    # A draft and the target's own token at the same index: equal logits give the equal token.
    logits, state, slot, index, history = batch()
    twice = run(
        jnp.concatenate([logits, logits]),
        state,
        jnp.concatenate([slot, slot]),
        jnp.concatenate([index, index]),
        history,
    )
    assert np.array_equal(twice[: len(slot)], twice[len(slot) :])


def test_noise_is_finite_and_standard_gumbel() -> None:
    noise = np.asarray(gumbel_noise(jnp.arange(200, dtype=jnp.uint32), jnp.arange(200), 5000))
    assert noise.dtype == np.float32
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.006)  # 4.7 standard errors
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.02)
    levels = np.array([-1.0, 0.0, 1.0, 3.0, 6.0])
    share = (noise[:, :, None] <= levels).mean(axis=(0, 1))
    np.testing.assert_allclose(share, np.exp(-np.exp(-levels)), atol=0.0025)


@pytest.mark.parametrize("bad", [np.nan, -np.inf, np.inf])
def test_bad_logits_still_give_some_token(bad: float) -> None:
    logits, state, slot, index, history = batch()
    good = run(logits, state, slot, index, history)
    broken = np.asarray(slot) % 2 == 0
    tokens = run(jnp.where(broken[:, None], bad, logits), state, slot, index, history)
    assert ((tokens >= 0) & (tokens < V)).all()
    assert np.array_equal(tokens[~broken], good[~broken])


def test_banned_tokens_are_never_drawn() -> None:
    rows = 4096
    params = SamplingParams(temperature=2.0, allowed_token_ids=[3, 8, 9], banned_token_ids=[8])
    tokens = run(
        jnp.zeros((rows, V), jnp.float32),
        make_state([params], V),
        jnp.zeros(rows, jnp.int32),
        jnp.arange(rows, dtype=jnp.int32),
        jnp.zeros((1, 4), jnp.int32),
    )
    assert set(tokens.tolist()) == {3, 9}


def test_one_program_serves_every_mix_of_options() -> None:
    program = jax.jit(lambda *rows: sample(*rows))  # jax shares the cache of one function
    logits, _, slot, index, history = batch()
    for requests in (REQUESTS, [SamplingParams(temperature=0)] * R, REQUESTS[::-1]):
        program(logits, make_state(requests, V), slot, index, history)
    assert program._cache_size() == 1


def test_logprobs_are_those_of_the_raw_logits() -> None:
    random = np.random.default_rng(3)
    logits = random.normal(scale=4, size=(5, 40)).astype(np.float32)
    tokens = random.integers(0, 40, 5).astype(np.int32)
    chosen, ids, values = jax.jit(logprobs)(jnp.asarray(logits), jnp.asarray(tokens))
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(chosen, exact[np.arange(5), tokens], atol=1e-5)
    assert np.array_equal(ids, np.argsort(-exact, axis=1, kind="stable")[:, :20])
    np.testing.assert_allclose(values, np.take_along_axis(exact, np.asarray(ids), 1), atol=1e-5)


def test_logprobs_of_a_vocabulary_below_twenty() -> None:
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.25]], jnp.float32))
    chosen, ids, values = logprobs(logits, int32(2))
    assert chosen.tolist() == pytest.approx([np.log(0.25)])
    assert ids[0].tolist() == [0, 1, 2] + [-1] * 17
    assert values[0, 3:].tolist() == [-np.inf] * 17
