"""Logits processing: cases worked out by hand, and a slow numpy model on random ones."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling.reference import int32, make_state, processed

from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.sampling.processors import process
from mmtp_jax.sampling.sampler import sample
from mmtp_jax.sampling.state import empty, host_row, write_masks, write_slot

INF = np.inf
LOGITS = [2.0, -1.0, 0.5, 0.0]
PROMPT_THEN_OUTPUT = [0, 1, 1, 2, 2, 2]  # a prompt of two tokens, then 1, 2, 2, 2

run = jax.jit(process)


def row(params: SamplingParams, index: int = 6, eos_token_ids: tuple[int, ...] = ()) -> list[float]:
    state = make_state([params], 4, prompt_lens=2, eos_token_ids=eos_token_ids)
    history = jnp.array([[*PROMPT_THEN_OUTPUT, 3, 3]], jnp.int32)
    result = run(jnp.array([LOGITS], jnp.float32), state, int32(0), int32(index), history)
    return result[0].tolist()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, LOGITS),
        ({"logit_bias": {1: 3.5, 2: -100}}, [2.0, 2.5, -99.5, 0.0]),
        ({"allowed_token_ids": [1, 3]}, [-INF, -1.0, -INF, 0.0]),
        ({"banned_token_ids": [0]}, [-INF, -1.0, 0.5, 0.0]),
        # Tokens 0 (prompt only), 1 and 2 occur: positive logits are divided, others multiplied.
        ({"repetition_penalty": 2.0}, [1.0, -2.0, 0.25, 0.0]),
        ({"repetition_penalty": 0.5}, [4.0, -0.5, 1.0, 0.0]),
        # The output holds 1 once and 2 three times; 0 stands in the prompt only.
        ({"frequency_penalty": 0.5}, [2.0, -1.5, -1.0, 0.0]),
        ({"presence_penalty": 0.5}, [2.0, -1.5, 0.0, 0.0]),
        ({"presence_penalty": -0.5, "frequency_penalty": 1.0}, [2.0, -1.5, -2.0, 0.0]),
        # Bias comes before the repetition penalty, the additive penalties after it.
        (
            {"logit_bias": {1: 3.0}, "repetition_penalty": 2.0, "presence_penalty": 1.0},
            [1.0, 0.0, -0.75, 0.0],
        ),
        ({"banned_token_ids": [0], "repetition_penalty": 0.5}, [-INF, -0.5, 1.0, 0.0]),
    ],
)
def test_greedy_rows_by_hand(options: dict[str, object], expected: list[float]) -> None:
    assert row(SamplingParams(temperature=0, **options)) == expected


def test_the_temperature_divides_last() -> None:
    assert row(SamplingParams(temperature=0.5)) == [4.0, -2.0, 1.0, 0.0]
    assert row(SamplingParams(temperature=0.5, presence_penalty=1.0)) == [4.0, -4.0, -1.0, 0.0]


def test_stop_ids_are_banned_until_min_tokens() -> None:
    params = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=[0])
    # Two prompt tokens and three output tokens: index 5 is the first where a stop id may come.
    assert row(params, index=2, eos_token_ids=(3,)) == [-INF, -1.0, 0.5, -INF]
    assert row(params, index=4, eos_token_ids=(3,)) == [-INF, -1.0, 0.5, -INF]
    assert row(params, index=5, eos_token_ids=(3,)) == LOGITS
    ignoring = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=[0], ignore_eos=True)
    assert row(ignoring, index=4, eos_token_ids=(3,)) == [-INF, -1.0, 0.5, 0.0]


def test_each_draft_row_sees_the_drafts_before_it() -> None:
    # One sequence of length 3 (prompt 2) with drafts 3, 3 behind it; rows 3, 4, 5 of one step.
    state = make_state([SamplingParams(temperature=0, frequency_penalty=1.0)], 4, prompt_lens=2)
    history = jnp.array([[0, 1, 2, 3, 3, 0]], jnp.int32)
    logits = jnp.zeros((3, 4), jnp.float32)
    result = run(logits, state, int32(0, 0, 0), int32(3, 4, 5), history)
    assert result.tolist() == [[0, 0, -1, 0], [0, 0, -1, -1], [0, 0, -1, -2]]


def test_what_stands_at_or_after_the_index_is_not_seen() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=2.0, presence_penalty=1.0)
    state = make_state([params], 4, prompt_lens=1)
    logits = jnp.array([LOGITS], jnp.float32)
    clean = run(logits, state, int32(0), int32(2), jnp.array([[0, 1, 0, 0]], jnp.int32))
    stale = run(logits, state, int32(0), int32(2), jnp.array([[0, 1, 3, -7]], jnp.int32))
    assert np.array_equal(clean, stale)


def test_a_stale_bias_is_not_used() -> None:
    state = make_state([SamplingParams(temperature=0), SamplingParams(logit_bias={0: 1.0})], 4)
    state = dataclasses.replace(state, bias=state.bias.at[0].set(jnp.nan))
    logits = jnp.array([LOGITS, LOGITS], jnp.float32)
    result = run(logits, state, int32(0, 1), int32(1, 1), jnp.zeros((2, 4), jnp.int32))
    assert result[0].tolist() == LOGITS
    assert result[1].tolist() == [3.0, -1.0, 0.5, 0.0]


def test_masks_hold_at_their_indices_only() -> None:
    """Two indices from 5 on; a vocabulary of 40 needs two words of bits."""
    random = np.random.default_rng(4)
    allowed = random.random((2, 40)) < 0.5
    allowed[:, 31] = [True, False]  # the sign bit
    words = np.packbits(np.pad(allowed, ((0, 0), (0, 24))), axis=1, bitorder="little")
    masks = jnp.asarray(words.view(np.int32))[None]
    params = SamplingParams(temperature=0.5, logit_bias={0: 1.0}, repetition_penalty=2.0)
    state = make_state([params, params], 40, width=2)
    state = write_masks(state, int32(1), int32(5), masks)
    logits = jnp.asarray(random.normal(size=(7, 40)), jnp.float32)
    slot, index = int32(1, 1, 1, 1, 0, 2, 1), int32(4, 5, 6, 7, 5, 5, 6)
    history = jnp.asarray(random.integers(0, 40, (2, 8)), jnp.int32)
    free = make_state([params, params], 40, width=2)
    expected = np.array(run(logits, free, slot, index, history))
    for row, column in ((1, 0), (2, 1), (6, 1)):
        expected[row, ~allowed[column]] = -INF
    assert np.array_equal(run(logits, state, slot, index, history), expected)


def test_a_mask_alone_changes_a_greedy_row_and_no_other() -> None:
    state = empty(2, 4, width=1)
    for slot in (0, 1):
        state = write_slot(state, slot, host_row(SamplingParams(temperature=0), 0, 0))
    state = write_masks(state, int32(0), int32(3), jnp.full((1, 1, 1), 0b1010, jnp.int32))
    logits = jnp.array([LOGITS] * 3, jnp.float32)
    history = jnp.zeros((2, 8), jnp.int32)
    tokens = jax.jit(sample)(logits, state, int32(0, 0, 1), int32(3, 4, 3), history)
    assert tokens.tolist() == [3, 0, 0]


def test_padding_rows_come_back_unchanged() -> None:
    params = SamplingParams(temperature=0.5, repetition_penalty=2.0, logit_bias={0: 1.0})
    state = make_state([params], 4)
    logits = jnp.array([LOGITS, LOGITS, LOGITS], jnp.float32)
    result = run(logits, state, int32(1, 0, 50), int32(3, 1, -9), jnp.zeros((1, 4), jnp.int32))
    assert result[0].tolist() == LOGITS
    assert result[1].tolist() == [3.0, -2.0, 1.0, 0.0]
    assert result[2].tolist() == LOGITS


V, L, R = 6, 10, 3
tokens = st.lists(st.integers(0, V - 1), min_size=L, max_size=L)
# Plain dictionaries: hypothesis forbids what the run-time type checks do inside its strategies.
request_options = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "presence_penalty": st.sampled_from([0.0, 0.0, -2.0, 0.7]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 2.0, -0.3]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 0.2, 1.3]),
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.lists(st.integers(0, V - 1), max_size=2),
        "ignore_eos": st.booleans(),
        "logit_bias": st.none()
        | st.dictionaries(st.integers(0, V - 1), st.floats(-100, 100), max_size=3),
        "banned_token_ids": st.lists(st.integers(0, V - 1), max_size=2),
        "allowed_token_ids": st.none() | st.lists(st.integers(0, V - 1), min_size=1, max_size=V),
    }
)


@settings(max_examples=60)
@given(
    options=st.lists(request_options, min_size=R, max_size=R),
    histories=st.lists(tokens, min_size=R, max_size=R),
    prompt_lens=st.lists(st.integers(1, 4), min_size=R, max_size=R),
    drafts=st.integers(0, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_processing_agrees_with_a_slow_model(
    options: list[dict[str, Any]],
    histories: list[list[int]],
    prompt_lens: list[int],
    drafts: int,
    seed: int,
) -> None:
    requests = [SamplingParams(**values) for values in options]
    slots = [0, 1, 2, 2, 1]
    indices = [min(prompt_lens[slot] + drafts + row, L) for row, slot in enumerate(slots)]
    logits = np.random.default_rng(seed).normal(scale=3, size=(len(slots), V)).astype(np.float32)
    state = make_state(requests, V, prompt_lens, eos_token_ids=[V - 1])
    result = run(
        jnp.asarray(logits), state, int32(*slots), int32(*indices), jnp.array(histories, jnp.int32)
    )
    for row, (slot, index) in enumerate(zip(slots, indices, strict=True)):
        expected = processed(
            logits[row], requests[slot], histories[slot][:index], prompt_lens[slot], [V - 1]
        )
        np.testing.assert_allclose(result[row], expected, rtol=1e-5, atol=1e-4)
