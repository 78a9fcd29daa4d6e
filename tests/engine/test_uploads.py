"""How often an engine tells its device something new."""

from __future__ import annotations

import pytest
from engine.harness import Harness
from engine.models import plain
from engine.suite import limited, prompt

from mmtp_jax.engine.plan import StepPlan


@pytest.fixture(scope="module")
def engine() -> Harness:
    return Harness(plain(), num_pages=64)


@pytest.fixture
def uploads(engine: Harness, monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """The plans that are put on the device from now on."""
    made: list[StepPlan] = []
    upload = engine.core.device.programs.upload

    def counted(plan: StepPlan) -> StepPlan:
        made.append(plan)
        return upload(plan)

    engine.reset()
    monkeypatch.setattr(engine.core.device.programs, "upload", counted)
    return made


def test_a_plan_is_uploaded_once_while_it_stays_the_same(
    engine: Harness, uploads: list[StepPlan]
) -> None:
    steps = engine.core.stats.steps
    assert engine.generate(prompt(5), limited(40)) == list(engine.text(prompt(5), 40))
    assert engine.core.stats.steps - steps == 40
    # The prompt with all pages, then one row each.
    assert [plan.rows.tolist()[0] for plan in uploads] == [5, 1]


def test_a_plan_is_uploaded_whenever_the_batch_changes(
    engine: Harness, uploads: list[StepPlan]
) -> None:
    first = engine.add(prompt(5), limited(30))
    for _ in range(6):
        engine.step()
    second = engine.add(prompt(3), limited(4))
    engine.run()
    assert engine.output[first] == list(engine.text(prompt(5), 30))
    assert engine.output[second] == list(engine.text(prompt(3), 4))
    rows = [plan.rows.tolist()[:2] for plan in uploads]
    assert rows == [[5, 0], [1, 0], [1, 3], [1, 1], [1, 0]]


def test_a_new_request_of_an_old_name_is_another_one(
    engine: Harness, uploads: list[StepPlan]
) -> None:
    """It starts in the same slot with the same rows, and not with the pages of the first."""
    other = None
    for ids in (prompt(5), prompt(5, seed=1)):
        engine.core.add("name", ids, limited(9), 0)
        engine.output["name"] = []
        engine.run()
        assert engine.output["name"] == list(engine.text(ids, 9))
        assert uploads[-1] is not other
        other = uploads[-1]
    assert len(uploads) == 4
