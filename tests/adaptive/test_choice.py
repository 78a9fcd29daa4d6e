"""The choice of program and drafts, against all that could be chosen."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from adaptive.simulate import PROGRAMS, measured

from mmtp_jax.adaptive.choice import choose
from mmtp_jax.adaptive.costs import Program, StepCosts


def best_rate(
    probabilities: np.ndarray, seconds: dict[Program, float], most: np.ndarray | None
) -> float:
    """The highest rate of any program and drafts of each request."""
    batch, width = probabilities.shape
    bounds = np.full(batch, width) if most is None else most
    best = 0.0
    for drafts in itertools.product(*(range(bound + 1) for bound in bounds)):
        tokens = batch + sum(
            probabilities[request, :count].sum() for request, count in enumerate(drafts)
        )
        for program, cost in seconds.items():
            if program.depth >= max(drafts) and program.rows >= batch + sum(drafts):
                best = max(best, tokens / cost)
    return best


@pytest.mark.parametrize("seed", range(40))
def test_nothing_else_is_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch, width = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    conditional = rng.choice([0.0, 0.3, 0.7, 0.9, 1.0], (batch, width))
    probabilities = np.cumprod(conditional, axis=1)
    most = rng.integers(0, width + 1, batch) if seed % 2 else None
    seconds = {
        Program(depth, rows): 1 + rng.random() / 4 * depth + rng.random() / 8 * rows
        for depth in range(width + 1)
        for rows in (4, 6, 8, 16)
    }
    costs = StepCosts(seconds)
    choice = choose(probabilities, tuple(seconds), costs, most)
    drafts, program = choice.drafts, choice.program
    assert (drafts <= (width if most is None else most)).all()
    assert (drafts <= program.depth).all() and batch + drafts.sum() <= program.rows
    taken = np.arange(width) < drafts[:, None]
    rate = (batch + probabilities[taken].sum()) / costs.seconds(program)
    assert choice.rate == pytest.approx(rate)
    real = {program: costs.seconds(program) for program in seconds}
    assert choice.rate == pytest.approx(best_rate(probabilities, real, most))


def test_the_smallest_program_wins_among_equals() -> None:
    programs = (Program(2, 16), Program(0, 16), Program(0, 8), Program(2, 8))
    costs = StepCosts(dict.fromkeys(programs, 1.0))
    choice = choose(np.zeros((4, 2)), programs, costs)
    assert choice.program == Program(0, 8) and not choice.drafts.any()


def test_rows_that_are_computed_anyway_are_filled() -> None:
    costs = StepCosts({Program(2, 8): 1.0})
    choice = choose(np.array([[0.5, 0.2], [0.4, 0.0], [0.0, 0.0]]), (Program(2, 8),), costs)
    assert choice.drafts.tolist() == [2, 2, 1]


def test_no_program_for_so_many_requests() -> None:
    costs = StepCosts({Program(0, 8): 1.0})
    with pytest.raises(ValueError, match="no program has rows for 9 requests"):
        choose(np.zeros((9, 2)), (Program(0, 8),), costs)


def test_it_is_quick() -> None:
    rng = np.random.default_rng(0)
    probabilities = np.cumprod(rng.random((256, 8)), axis=1)
    costs, most = StepCosts(measured()), rng.integers(0, 9, 256)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        choose(probabilities, PROGRAMS, costs, most)
        times.append(time.perf_counter() - start)
    # 0.1 ms on one core of 2.5 GHz; checks of types included.
    assert min(times) < 2e-3
