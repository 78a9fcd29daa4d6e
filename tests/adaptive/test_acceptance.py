"""What verifications tell about the acceptance of drafts, of all requests and of each."""

from __future__ import annotations

import numpy as np

from mmtp_jax.adaptive.acceptance import INITIAL_RATE, AcceptanceEstimate

N = 4
ALL = np.arange(8)


def verify(
    estimate: AcceptanceEstimate, rates: np.ndarray, steps: int, drafted: int = N, seed: int = 0
) -> None:
    """Steps of eight requests of such conditional acceptance, [8, N] or [N]."""
    values = np.cumprod(np.broadcast_to(rates, (8, N)), axis=1)[:, :drafted]
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        accepted = (rng.random(8)[:, None] < values).sum(1)
        estimate.count(ALL, np.full(8, drafted), accepted)


def test_it_begins_with_hope() -> None:
    estimate = AcceptanceEstimate(8, N)
    expected = np.broadcast_to(INITIAL_RATE ** np.arange(1, N + 1), (2, N))
    np.testing.assert_allclose(estimate.probabilities(ALL[:2]), expected)


def test_it_learns_the_rate_of_each_position() -> None:
    rates = np.array([0.9, 0.5, 0.8, 0.3])
    estimate = AcceptanceEstimate(8, N)
    verify(estimate, rates, 300)
    estimate.reset(0)
    np.testing.assert_allclose(estimate.probabilities(ALL[:1])[0], np.cumprod(rates), atol=0.04)


def test_it_tells_requests_apart() -> None:
    estimate = AcceptanceEstimate(8, N)
    verify(estimate, np.where(ALL % 2, 0.9, 0.1)[:, None] * np.ones(N), 60)
    first = estimate.probabilities(ALL)[:, 0]
    assert (first[1::2] > 0.75).all() and (first[::2] < 0.25).all()
    estimate.reset(1)
    assert 0.4 < estimate.probabilities(ALL[1:2])[0, 0] < 0.6


def test_probabilities_never_rise_with_the_position() -> None:
    estimate = AcceptanceEstimate(8, N)
    verify(estimate, np.array([0.2, 1.0, 1.0, 1.0]), 50)
    probabilities = estimate.probabilities(ALL)
    assert (np.diff(probabilities, axis=1) <= 0).all()
    assert (probabilities >= 0).all() and (probabilities <= 1).all()


def test_what_was_not_tried_says_nothing() -> None:
    estimate = AcceptanceEstimate(8, N)
    estimate.count(ALL[:3], np.array([0, 2, 4]), np.array([0, 2, 1]))
    probabilities = estimate.probabilities(ALL[:4])
    conditional = probabilities[:, 1:] / probabilities[:, :-1]
    # Position 0: two matches. Position 1: one match (slot 1), one mismatch (slot 2). No others.
    assert probabilities[0, 0] == probabilities[3, 0] > INITIAL_RATE
    assert probabilities[1, 0] == probabilities[2, 0] > probabilities[3, 0]
    assert conditional[1, 0] > conditional[3, 0] > conditional[2, 0]
    np.testing.assert_allclose(conditional[:, 1:], INITIAL_RATE)


def test_a_change_is_learnt_in_as_many_steps_as_the_old_rate() -> None:
    estimate = AcceptanceEstimate(8, N)
    verify(estimate, np.full(N, 0.8), 1000)
    verify(estimate, np.full(N, 0.2), 300, drafted=1)
    first, second = estimate.probabilities(ALL).mean(0)[:2]
    assert abs(first - 0.2) < 0.06
    # Nobody tried the second position: its rate is remembered, but it now takes few trials to
    # change it.
    assert abs(second / first - 0.8) < 0.06
    verify(estimate, np.array([1.0, 0.0, 0.0, 0.0]), 16)
    first, second = estimate.probabilities(ALL).mean(0)[:2]
    assert second / first < 0.65
