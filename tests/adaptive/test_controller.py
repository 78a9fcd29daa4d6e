"""The controller in a simulated engine: against plain decoding, against the best fixed number of
drafts, after changes, and without end."""

from __future__ import annotations

import numpy as np
import pytest
from adaptive.simulate import (
    PROGRAMS,
    SLOTS,
    N,
    Simulation,
    drafts_of,
    measured,
    new_controller,
    smallest,
    step_seconds,
)

from mmtp_jax.adaptive.controller import (
    EXPLORED,
    INTERVAL,
    PLAIN_INTERVAL,
    RESTART_HORIZON,
    DraftController,
)
from mmtp_jax.adaptive.costs import Program, StepCosts

EVERY_OTHER = np.where(np.arange(SLOTS) % 2, 0.9, 0.1)
ONE_IN_EIGHT = np.where(np.arange(SLOTS) % 8, 0.0, 0.9)


def fixed_rate(load: int, rates: np.ndarray | float, drafts: int) -> float:
    """Tokens per second when all requests verify as many drafts."""
    conditional = np.broadcast_to(np.asarray(rates, float), SLOTS)[:load, None]
    tokens = load + (conditional ** np.arange(1, drafts + 1)).sum()
    return float(tokens / step_seconds(smallest(drafts, load * (drafts + 1)), load))


def best_fixed_rate(load: int, rates: np.ndarray | float) -> float:
    return max(fixed_rate(load, rates, drafts) for drafts in (1, 2, 4, 8, 0))


def quick_ones_first(load: int, rates: np.ndarray | float) -> tuple[pytest.MarkDecorator, ...]:
    quick = load < 256 and (isinstance(rates, np.ndarray) or rates in (0.0, 0.6))
    return () if quick else (pytest.mark.slow,)


@pytest.mark.parametrize(
    ("load", "rates"),
    [
        pytest.param(load, rates, marks=quick_ones_first(load, rates))
        for load in (1, 8, 64, 256)
        for rates in (0.0, 0.3, 0.6, 0.8, 0.95, EVERY_OTHER, ONE_IN_EIGHT)
    ],
)
def test_it_is_about_as_fast_as_the_best_fixed_number(load: int, rates: np.ndarray | float) -> None:
    plain, best = fixed_rate(load, rates, 0), best_fixed_rate(load, rates)
    simulation = Simulation(load, rates, new_controller(), seed=1)
    # Until the acceptance is known.
    assert simulation.run(100) >= 0.8 * plain
    rate = simulation.run(300)
    assert rate >= 0.98 * plain
    assert rate >= 0.95 * best


@pytest.mark.parametrize(
    ("load", "rates"),
    [
        pytest.param(load, rates, marks=() if (load, rates) == (64, 0.0) else pytest.mark.slow)
        for load in (1, 8, 64, 256)
        for rates in (0.0, 0.3, 0.6, 0.8, 0.9)
    ],
)
def test_so_it_is_where_prompts_keep_coming(load: int, rates: float) -> None:
    """Their prefills leave out modules that do not pay."""

    def rate(drafts: DraftController | int) -> float:
        simulation = Simulation(load, rates, drafts, length=190, seed=1)
        simulation.run(300)
        return simulation.run(300)

    plain, found = rate(0), rate(new_controller())
    assert found >= 0.98 * plain
    assert found >= 0.92 * max(plain, *(rate(drafts) for drafts in (1, 2, 4, 8)))


def test_a_hopeless_model_costs_next_to_nothing() -> None:
    controller = new_controller()
    rate = Simulation(2, 0.0, controller, seed=2).run(1200)
    assert controller.program is not None and controller.program.depth == 0
    assert rate >= 0.98 * fixed_rate(2, 0.0, 0)


@pytest.mark.parametrize(
    ("load", "rates"),
    [
        (1, 0.4),
        pytest.param(8, 0.6, marks=pytest.mark.slow),
        pytest.param(64, 0.8, marks=pytest.mark.slow),
        pytest.param(256, EVERY_OTHER, marks=pytest.mark.slow),
    ],
)
def test_programs_do_not_alternate(load: int, rates: np.ndarray | float) -> None:
    simulation = Simulation(load, rates, new_controller(), seed=3)
    simulation.run(2000)
    assert simulation.num_switches <= 12
    assert simulation.num_restarts <= 8 * load


def test_it_recovers_from_another_load() -> None:
    def rates(drafts: DraftController | int) -> list[float]:
        simulation = Simulation(256, 0.6, drafts, length=200, seed=4)
        simulation.run(200)
        found = []
        for load in (8, 256):
            simulation.set_load(load)
            simulation.run(100)
            found.append(simulation.run(200))
        return found

    for found, fixed in zip(rates(new_controller()), rates(2), strict=True):
        assert found >= 0.9 * fixed


@pytest.mark.parametrize(
    ("length", "steps"), [(200, 400), pytest.param(1000, 1500, marks=pytest.mark.slow)]
)
def test_it_recovers_from_another_acceptance(length: int | None, steps: int) -> None:
    simulation = Simulation(8, 0.8, new_controller(), length=length, seed=5)
    simulation.run(200)
    simulation.set_rates(0.2)
    simulation.run(300)
    assert simulation.run(200) >= 0.9 * Simulation(8, 0.2, 1, length=length, seed=5).run(400)
    simulation.set_rates(0.8)
    simulation.run(steps)
    assert simulation.run(200) >= 0.9 * Simulation(8, 0.8, 4, length=length, seed=5).run(400)


@pytest.mark.parametrize(
    ("load", "length"), [(64, 190), (8, 64), pytest.param(256, 190, marks=pytest.mark.slow)]
)
def test_it_finds_out_that_drafts_became_good_where_prompts_keep_coming(
    load: int, length: int
) -> None:
    """Once their prefills leave modules out, only a new request that does not can tell."""
    controller = new_controller()
    simulation = Simulation(load, 0.0, controller, length=length, seed=6)
    simulation.run(600)
    assert controller.prefill_depth == 0
    simulation.set_rates(0.9)
    simulation.run(2500)
    fixed = Simulation(load, 0.9, N, length=length, seed=6)
    fixed.run(300)
    assert simulation.run(300) >= 0.85 * fixed.run(300)


def test_a_lone_hopeless_request_is_tried_again() -> None:
    simulation = Simulation(1, 0.0, new_controller(), seed=6)
    simulation.run(400)
    simulation.set_rates(0.9)
    simulation.run(1500)
    assert simulation.run(100) >= 0.9 * fixed_rate(1, 0.9, 8)


def test_new_requests_try_all_drafts_at_first() -> None:
    controller = new_controller()
    slots, all_of = np.arange(4), np.full(4, N)
    for slot in range(4):
        controller.admitted(slot)
    for _ in range(EXPLORED):
        controller.decide(slots, all_of, 0 * slots)
        assert [controller.drafts(slot) for slot in range(4)] == [N] * 4
        controller.observed(slots, all_of, np.zeros(4, np.int64))
    for _ in range(INTERVAL):
        controller.decide(slots, all_of, 0 * slots)
        controller.observed(slots, drafts_of(controller, slots), np.zeros(4, np.int64))
    assert (drafts_of(controller, slots) < N).all()


def test_drafts_never_exceed_what_a_request_is_able_to() -> None:
    controller = new_controller()
    rng = np.random.default_rng(7)
    slots = np.arange(16)
    for slot in range(16):
        controller.admitted(slot)
    for _ in range(PLAIN_INTERVAL):
        most = rng.integers(0, N + 1, 16)
        controller.decide(slots, most, 0 * slots)
        drafts = drafts_of(controller, slots)
        assert (drafts <= most).all()
        controller.observed(slots, drafts, drafts)
        controller.took(Program(N, 256), 2e-3)


def test_restarts_are_few_at_a_time_and_not_repeated() -> None:
    controller = new_controller()
    slots, behind = np.arange(16), np.zeros(16, np.int64)
    for slot in range(16):
        controller.admitted(slot)
    for _ in range(10):
        controller.decide(slots, np.full(16, N), 0 * slots)
        controller.observed(slots, np.full(16, N), np.full(16, N))
    asked: list[int] = []
    for step in range(RESTART_HORIZON + 2 * INTERVAL):
        controller.decide(slots, behind, 0 * slots)
        restarts = controller.restarts()
        assert len(restarts) <= 2 and controller.restarts() == []
        asked += restarts
        controller.observed(slots, behind, behind)
        controller.took(Program(0, 16), 1e-3)
        if step < RESTART_HORIZON - 10 - INTERVAL:
            assert not asked
    assert len(asked) >= 6 and len(set(asked)) == len(asked)


def test_an_empty_batch_is_no_decision() -> None:
    controller = new_controller()
    controller.decide(np.arange(0), np.arange(0), np.arange(0))
    assert controller.program is None and controller.restarts() == []


def test_more_requests_than_any_program_has_rows_for() -> None:
    """Some of those that run await their results, so that others were admitted beside them."""
    programs = [Program(0, 4), Program(1, 4)]
    controller = DraftController(9, 1, programs, StepCosts(dict.fromkeys(programs, 1e-3)))
    for slot in range(9):
        controller.admitted(slot)
    for batch in (9, 3, 5):
        controller.decide(np.arange(batch), np.ones(batch, np.int64), np.zeros(batch, np.int64))
        assert controller.program is not None
        assert controller.program.most_requests >= min(batch, 4)
        controller.took(controller.program, 1e-3)


def test_plain_and_deepest_programs_are_needed() -> None:
    programs = [program for program in PROGRAMS if program.depth > 0]
    with pytest.raises(ValueError, match=r"depths 0 and 8, got \[1, 2, 4, 8\]"):
        DraftController(4, N, programs, StepCosts(measured()))
