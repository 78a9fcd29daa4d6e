"""Synthetic drafts: how many are right, and which."""

from __future__ import annotations

import numpy as np
import pytest

from mmtp_jax.bench.acceptance import expected_tokens_per_step, proposals

TEXTS = np.random.default_rng(0).integers(50, size=(20, 500)).tolist()


def test_probability_one_proposes_the_text() -> None:
    np.testing.assert_array_equal(proposals(TEXTS, 1.0, 50, seed=0), TEXTS)


def test_probability_zero_proposes_nothing_of_it() -> None:
    table = proposals(TEXTS, 0.0, 50, seed=0)
    assert np.all(table != TEXTS) and table.min() >= 0 and table.max() < 50


def test_drafts_are_right_independently() -> None:
    right = proposals(TEXTS, 0.7, 50, seed=1) == TEXTS
    # 10,000 coins: six standard deviations are 0.03.
    assert abs(right.mean() - 0.7) < 0.03
    assert abs((right[:, 1:] & right[:, :-1]).mean() - 0.49) < 0.03


def test_coins_depend_on_the_seed_alone() -> None:
    first, again, other = (proposals(TEXTS, 0.5, 50, seed=seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert np.any(first != other)


@pytest.mark.parametrize(
    ("probability", "drafts", "expected"), [(0.0, 8, 1.0), (1.0, 8, 9.0), (0.5, 2, 1.75)]
)
def test_expected_tokens_per_step(probability: float, drafts: int, expected: float) -> None:
    assert expected_tokens_per_step(probability, drafts) == expected
