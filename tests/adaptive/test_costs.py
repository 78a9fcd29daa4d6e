"""Seconds per step: the warm-up's figures, stalls, lasting changes and programs not measured."""

from __future__ import annotations

import pytest

from mmtp_jax.adaptive.costs import RECENT_STEPS, Program, StepCosts

SMALL, LARGE, DEEP = Program(0, 8), Program(0, 64), Program(2, 64)
MEASURED = {SMALL: 1.0, LARGE: 2.0, DEEP: 3.0}


def test_it_begins_with_what_was_measured() -> None:
    costs = StepCosts(MEASURED)
    assert [costs.seconds(program) for program in MEASURED] == [1.0, 2.0, 3.0]


def test_a_program_follows_what_it_took() -> None:
    costs = StepCosts(MEASURED)
    for _ in range(20):
        costs.observe(SMALL, 1.5)
    assert costs.seconds(SMALL) == 1.5
    for _ in range(20):
        costs.observe(SMALL, 1.2)
    assert costs.seconds(SMALL) == 1.2


@pytest.mark.parametrize("seen", [0, 1, 4, 100])
def test_a_stall_changes_nothing(seen: int) -> None:
    costs = StepCosts(MEASURED)
    for _ in range(seen):
        costs.observe(DEEP, 3.0)
    costs.observe(DEEP, 300.0)
    assert [costs.seconds(program) for program in MEASURED] == [1.0, 2.0, 3.0]


def test_other_programs_take_as_much_longer() -> None:
    costs = StepCosts(MEASURED)
    for _ in range(20):
        costs.observe(LARGE, 2.5)
    assert costs.seconds(SMALL) == pytest.approx(1.5)
    assert costs.seconds(DEEP) == pytest.approx(3.5)


def test_programs_between_two_take_what_lies_between() -> None:
    costs = StepCosts({**MEASURED, Program(1, 64): 2.5})
    for _ in range(20):
        costs.observe(LARGE, 2.2)
        costs.observe(DEEP, 4.0)
    assert costs.seconds(Program(1, 64)) == pytest.approx(2.5 + (0.2 + 1.0) / 2)


def test_other_programs_are_faster_by_the_same_factor() -> None:
    costs = StepCosts(MEASURED)
    for _ in range(20):
        costs.observe(DEEP, 1.5)
    assert costs.seconds(SMALL) == pytest.approx(0.5)


def test_what_was_seen_long_ago_is_forgotten() -> None:
    costs = StepCosts(MEASURED)
    for _ in range(20):
        costs.observe(LARGE, 4.0)
    for _ in range(RECENT_STEPS):
        costs.observe(SMALL, 1.0)
    assert costs.seconds(LARGE) == 4.0
    costs.observe(SMALL, 1.0)
    assert costs.seconds(LARGE) == 2.0


def test_where_nobody_waits_for_the_device_all_steps_take_what_the_host_takes() -> None:
    costs = StepCosts(MEASURED)
    for _ in range(20):
        costs.observe(SMALL, 2.4, waited=False)
    assert [costs.seconds(program) for program in MEASURED] == [2.4, 2.4, 3.0]
    costs.forget()
    assert costs.seconds(SMALL) == 1.0


def test_one_stall_of_the_host_changes_nothing() -> None:
    costs = StepCosts(MEASURED)
    costs.observe(SMALL, 300.0, waited=False)
    assert costs.seconds(SMALL) == 1.0
    for _ in range(20):
        costs.observe(SMALL, 1.4, waited=False)
    costs.observe(SMALL, 300.0, waited=False)
    assert costs.seconds(SMALL) == 1.4


def test_a_quick_step_tells_that_both_are_quick() -> None:
    costs = StepCosts(MEASURED)
    for _ in range(20):
        costs.observe(SMALL, 2.4, waited=False)
    for _ in range(20):
        costs.observe(DEEP, 2.0)
    assert costs.seconds(DEEP) == costs.seconds(SMALL) == 2.0
    for _ in range(20):
        costs.observe(DEEP, 1.5, waited=False)
    assert costs.seconds(DEEP) == 1.5


def test_it_can_forget() -> None:
    costs = StepCosts(MEASURED)
    costs.observe(LARGE, 4.0)
    costs.observe(LARGE, 4.0)
    costs.observe(LARGE, 4.0)
    assert costs.seconds(LARGE) == 4.0
    costs.forget()
    assert [costs.seconds(program) for program in MEASURED] == [1.0, 2.0, 3.0]


def test_programs_that_were_not_measured_lie_on_a_line() -> None:
    costs = StepCosts(MEASURED)
    assert costs.seconds(Program(0, 36)) == pytest.approx(1.5)
    assert costs.seconds(Program(0, 120)) == pytest.approx(3.0)
    assert costs.seconds(Program(0, 1)) == 1.0
    assert costs.seconds(Program(2, 128)) == pytest.approx(6.0)
    costs.observe(Program(0, 36), 1.5)
    with pytest.raises(ValueError, match="no program of depth 1 was measured"):
        costs.seconds(Program(1, 8))


def test_a_stall_at_warm_up_does_not_make_a_program_slower_than_larger_ones() -> None:
    assert StepCosts({**MEASURED, LARGE: 90.0}).seconds(LARGE) == 3.0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_measurements_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="measured seconds must be positive"):
        StepCosts({SMALL: seconds})
    with pytest.raises(ValueError, match="at least 1 program"):
        StepCosts({})
