"""Top-k, top-p and min-p: hand cases, ties, and properties of the kept set."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling.reference import int32, make_state, probabilities

from mmtp_jax.sampling.filters import filter_scores
from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.sampling.state import params_of

V = 8
PROBABILITIES = [0.4, 0.02, 0.2, 0.05, 0.1, 0.03, 0.15, 0.05]


@jax.jit
def run(scores, state, slot):
    return filter_scores(scores, params_of(state, slot))


def kept(params: SamplingParams, scores: np.ndarray) -> list[int]:
    state = make_state([params], V)
    result = np.asarray(run(jnp.asarray(scores, jnp.float32)[None], state, int32(0))[0])
    stays = result > -np.inf
    assert np.array_equal(result[stays], np.asarray(scores, np.float32)[stays])
    return np.flatnonzero(stays).tolist()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, range(8)),
        ({"top_k": 1}, [0]),
        ({"top_k": 3}, [0, 2, 6]),
        ({"top_k": 6}, [0, 2, 3, 4, 6, 7]),
        ({"top_k": 8}, range(8)),
        ({"top_k": 1000}, range(8)),
        ({"top_k": -1}, range(8)),
        # Tokens 3 and 7 tie for the fifth place: the lower id stays.
        ({"top_k": 5}, [0, 2, 3, 4, 6]),
        ({"top_p": 1e-300}, [0]),
        ({"top_p": 0.39}, [0]),
        ({"top_p": 0.41}, [0, 2]),
        ({"top_p": 0.74}, [0, 2, 6]),
        ({"top_p": 0.87}, [0, 2, 3, 4, 6]),
        ({"top_p": 0.91}, [0, 2, 3, 4, 6, 7]),
        ({"top_p": 0.985}, range(8)),
        ({"min_p": 0.26}, [0, 2, 6]),
        ({"min_p": 0.24}, [0, 2, 4, 6]),
        ({"min_p": 1.0}, [0]),
        # After top-k 3 the kept ones have 0.53, 0.27, 0.2: top-p counts from those.
        ({"top_k": 3, "top_p": 0.79}, [0, 2]),
        ({"top_k": 3, "top_p": 0.81}, [0, 2, 6]),
        # min-p leaves four; the third of them completes 0.87 of their mass.
        ({"min_p": 0.24, "top_p": 0.87}, [0, 2, 6]),
        ({"min_p": 0.24, "top_k": 2}, [0, 2]),
    ],
)
def test_kept_tokens_by_hand(options: dict[str, float], expected: list[int]) -> None:
    assert kept(SamplingParams(**options), np.log(PROBABILITIES)) == list(expected)


def test_equal_scores_are_cut_by_id() -> None:
    assert kept(SamplingParams(top_k=3), np.zeros(V)) == [0, 1, 2]
    assert kept(SamplingParams(top_p=0.5), np.zeros(V)) == [0, 1, 2, 3]
    assert kept(SamplingParams(top_p=0.51), np.zeros(V)) == [0, 1, 2, 3, 4]
    assert kept(SamplingParams(top_k=2), [-0.0, 0.0, -1, 0.0, -0.0, -5, -5, -5]) == [0, 1]


def test_banned_tokens_never_come_back() -> None:
    scores = np.array([-np.inf, 1, -np.inf, 0, -np.inf, -np.inf, -np.inf, -np.inf])
    for options in ({"top_k": 5}, {"top_p": 0.9999999}, {"min_p": 1e-30}):
        assert kept(SamplingParams(**options), scores) == [1, 3]


@settings(max_examples=150)
@given(
    scores=st.lists(
        st.integers(-6, 6).map(float)
        | st.floats(-40, 40, width=32, allow_subnormal=False)
        | st.just(-np.inf),
        min_size=V,
        max_size=V,
    ).filter(lambda scores: max(scores) > -np.inf),
    top_k=st.integers(0, V + 1),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.61, 0.3, 0.05]),
    min_p=st.sampled_from([0.0, 0.0, 0.011, 0.3]),
)
def test_kept_sets_agree_with_sorting(
    scores: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    expected = probabilities(np.array(scores), params)
    # What float32 and float64 may cut differently lies within rounding of a limit.
    for near in (1 - 1e-5, 1 + 1e-5):
        nearby = SamplingParams(top_k=top_k, top_p=min(top_p * near, 1.0), min_p=min_p * near)
        if not np.array_equal(probabilities(np.array(scores), nearby) > 0, expected > 0):
            return
    visible = np.exp(np.array(scores) - max(scores)) > 1e-30  # others vanish in float32
    result = np.isin(np.arange(V), kept(params, np.array(scores)))
    assert np.array_equal(result & visible, (expected > 0) & visible)


def test_rows_without_a_filter_are_not_touched_by_their_neighbours() -> None:
    requests = [
        SamplingParams(),
        SamplingParams(top_k=1),
        SamplingParams(top_p=0.01),
        SamplingParams(min_p=1.0),
        SamplingParams(temperature=0, top_k=1),
    ]
    scores = jnp.tile(jnp.log(jnp.array(PROBABILITIES, jnp.float32)), (6, 1))
    result = run(scores, make_state(requests, V), int32(0, 1, 2, 3, 4, 5))
    for row in (0, 4, 5):
        assert np.array_equal(result[row], scores[row])
    for row in (1, 2, 3):
        assert np.flatnonzero(np.asarray(result[row]) > -np.inf).tolist() == [0]
