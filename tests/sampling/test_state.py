"""SamplingState: packing, writing and reading slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling.reference import int32, make_state

from mmtp_jax.config import ConfigError
from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.sampling.state import (
    ROW_SIZE,
    bias_row,
    empty,
    host_row,
    mask_column,
    params_of,
    without_masks,
    write_bias,
    write_masks,
    write_slot,
)


@given(
    temperature=st.floats(1e-5, 1e6),
    top_k=st.integers(-1, 2**31 - 1),
    top_p=st.floats(1e-300, 1.0),
    min_p=st.floats(0.0, 1.0),
    penalty=st.floats(-2.0, 2.0),
    repetition=st.floats(1e-6, 1e6),
    seed=st.integers(-(2**63), 2**64 - 1),
    min_tokens=st.integers(0, 2**31 - 1),
    stop_ids=st.lists(st.integers(0, 2**31 - 1), max_size=16, unique=True),
)
def test_a_row_reads_back_as_the_parameters(
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    penalty: float,
    repetition: float,
    seed: int,
    min_tokens: int,
    stop_ids: list[int],
) -> None:
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        presence_penalty=penalty,
        frequency_penalty=-penalty,
        repetition_penalty=repetition,
        max_tokens=None,
        min_tokens=min_tokens,
        stop_token_ids=stop_ids,
    )
    state = write_slot(empty(3, 4), 1, host_row(params, seed, prompt_len=5))
    row = params_of(state, int32(0, 1, 2))
    assert row.temperature[1] == np.float32(temperature) > 0
    assert row.top_k[1] == max(top_k, 0)
    assert 0 < row.top_p[1] <= 1
    assert row.top_p[1] == pytest.approx(top_p, rel=1e-6, abs=2e-9)
    assert row.min_p[1] == np.float32(min_p)
    assert row.presence[1] == np.float32(penalty)
    assert row.frequency[1] == np.float32(-penalty)
    assert row.repetition[1] == np.float32(repetition) > 0
    assert int(row.seed[1]) == seed % 2**32
    assert row.prompt_len[1] == 5
    assert int(row.min_len[1]) == min(5 + min_tokens, 2**31 - 1)
    assert row.stop_ids[1].tolist() == stop_ids + [-1] * (16 - len(stop_ids))
    for values in row:
        assert np.array_equal(values[0], values[2]), "another slot was written"


def test_the_state_has_few_leaves() -> None:
    state = empty(3, 40, width=4)
    shapes = [leaf.shape for leaf in jax.tree.leaves(state)]
    assert shapes == [(3, ROW_SIZE), (3, 40), (3, 4, 2), (3,)]


def test_greedy_requests_use_no_filter() -> None:
    params = SamplingParams(temperature=1e-6, top_k=3, top_p=0.5, min_p=0.1)
    row = params_of(make_state([params], 4), int32(0))
    assert (row.temperature[0], row.top_k[0], row.top_p[0], row.min_p[0]) == (0, 0, 1, 0)


def test_slots_past_the_end_read_as_neutral_and_write_nothing() -> None:
    params = SamplingParams(temperature=0.7, top_k=2, logit_bias={1: 1.0})
    state = make_state([params, params], 4)
    row = params_of(state, int32(0, 2, 99, -1))
    assert row.temperature.tolist() == [np.float32(0.7), 0, 0, 0]
    assert row.has_bias.tolist() == [True, False, False, False]
    assert row.repetition.tolist() == [1, 1, 1, 1]
    written = write_slot(state, 2, host_row(SamplingParams(temperature=0), 0, 0))
    written = write_bias(written, 2, np.ones(4, np.float32))
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(written), strict=True):
        assert np.array_equal(before, after)


def test_writing_a_slot_forgets_the_bias_of_the_one_before() -> None:
    state = make_state([SamplingParams(banned_token_ids=[0])], 4)
    assert params_of(state, int32(0)).has_bias[0]
    state = jax.jit(write_slot)(state, jnp.int32(0), jnp.asarray(host_row(SamplingParams(), 0, 0)))
    assert not params_of(state, int32(0)).has_bias[0]
    state = jax.jit(write_bias)(state, jnp.int32(0), jnp.arange(4, dtype=jnp.float32))
    assert params_of(state, int32(0)).has_bias[0]
    assert state.bias[0].tolist() == [0, 1, 2, 3]


def test_masks_are_written_to_their_slots_and_hold_from_their_start_on() -> None:
    state = empty(3, 40, width=2)
    masks = jnp.arange(1, 13, dtype=jnp.int32).reshape(3, 2, 2)
    written = jax.jit(write_masks)(state, int32(2, 3, 0), int32(7, 5, 0), masks)
    assert written.mask_start.tolist() == [0, -1, 7]
    assert written.masks.tolist() == [masks[2].tolist(), [[0, 0], [0, 0]], masks[0].tolist()]
    slots = int32(2, 2, 2, 2, 0, 0, 1, 1, 3, -1)
    columns = mask_column(written, slots, int32(6, 7, 8, 9, 0, 2, 0, -1, 7, 7))
    assert columns.tolist() == [-1, 0, 1, -1, 0, -1, -1, -1, -1, -1]
    assert (mask_column(without_masks(written), slots, jnp.full(10, 7)) == -1).all()


def test_writing_a_slot_forgets_the_masks_of_the_one_before() -> None:
    state = write_masks(empty(2, 4), int32(0, 1), int32(3, 4), jnp.zeros((2, 1, 1), jnp.int32))
    state = jax.jit(write_slot)(state, jnp.int32(0), jnp.asarray(host_row(SamplingParams(), 0, 0)))
    assert state.mask_start.tolist() == [-1, 4]


def test_bias_rows() -> None:
    assert bias_row(SamplingParams(), 5) is None
    assert bias_row(SamplingParams(logit_bias={}), 5) is None
    params = SamplingParams(
        logit_bias={1: 2.5, 3: -100}, allowed_token_ids=[1, 2, 3], banned_token_ids=[2]
    )
    row = bias_row(params, 5)
    assert row is not None
    assert row.tolist() == [-np.inf, 2.5, -np.inf, -100, -np.inf]


def test_too_many_stop_ids_are_refused() -> None:
    with pytest.raises(ConfigError, match="stop_token_ids"):
        host_row(SamplingParams(stop_token_ids=range(16)), 0, 0, eos_token_ids=[40])
