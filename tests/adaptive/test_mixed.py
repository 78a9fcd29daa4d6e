"""What steps cost where some of them prefill, and how many modules run in those."""

from __future__ import annotations

import pytest

from mmtp_jax.adaptive.costs import Program, StepCosts
from mmtp_jax.adaptive.mixed import MixedCosts

PLAIN, WIDE, DEEP, DEEPEST = Program(0, 8), Program(0, 16), Program(4, 16), Program(4, 32)
SECONDS = {PLAIN: 1.0, WIDE: 1.2, DEEP: 3.0, DEEPEST: 4.0}


def mixed(every: int, chunk_rows: int = 8) -> MixedCosts:
    """After many steps, each so many of which prefilled."""
    costs = MixedCosts(tuple(SECONDS), 4, StepCosts(SECONDS))
    for step in range(640 + every):
        costs.count(chunk_rows if step % every == 0 else 0)
    return costs


def test_where_prompts_keep_coming_their_prefills_leave_modules_out() -> None:
    costs = mixed(every=1)
    assert costs.prefill_depth(PLAIN) == 0
    assert costs.seconds(PLAIN) == pytest.approx(1.2, rel=1e-3)
    assert costs.prefill_depth(DEEP) == 4
    assert costs.seconds(DEEP) == pytest.approx(4.0, rel=1e-3)


def test_where_prompts_are_rare_all_modules_run_in_their_prefills() -> None:
    costs = mixed(every=500)
    assert costs.prefill_depth(PLAIN) == 4
    assert costs.seconds(PLAIN) == 1.0


def test_all_modules_run_where_that_costs_little() -> None:
    seconds = {PLAIN: 1.0, WIDE: 1.2, DEEP: 1.205}
    costs = MixedCosts(tuple(seconds), 4, StepCosts(seconds))
    for _ in range(500):
        costs.count(8)
    assert costs.prefill_depth(PLAIN) == 4
    assert costs.seconds(PLAIN) == pytest.approx(1.205, rel=1e-3)


def test_a_program_has_room_for_the_rows_and_for_the_requests() -> None:
    costs = mixed(every=1)
    assert costs.step_seconds(0, 8) == 1.0
    assert costs.step_seconds(0, 9) == 1.2
    assert costs.step_seconds(1, 16) == 3.0
    assert costs.step_seconds(1, 70) == 3 * 4.0
    costs.num_requests = DEEP.most_requests + 1
    assert costs.step_seconds(0, 9) == 1.2
    assert costs.step_seconds(1, 16) == 4.0
