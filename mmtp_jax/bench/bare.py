"""The compiled step alone: one step of an engine, dispatched again and again.

Every repetition starts from what the requests were before the step (small arrays, copied in
advance), so each does the work of that step: the same rows, contexts, drafts and pages.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mmtp_jax.bench.roofline import Part
from mmtp_jax.engine.core import EngineCore
from mmtp_jax.engine.plan import StepPlan
from mmtp_jax.engine.programs import empty_plan
from mmtp_jax.engine.scheduler import ScheduledStep
from mmtp_jax.engine.state import EngineState

ROUNDS = 3
# Steps of a round: each has a copy of the requests' arrays.
MOST_STEPS = 64


@dataclasses.dataclass(frozen=True)
class BareStep:
    """Median milliseconds of a step of `rows` rows, and the requests' parts in it."""

    milliseconds: float
    rows: int
    parts: tuple[Part, ...]


def bare_step(core: EngineCore, steps: int) -> BareStep:
    """Measure the step that the engine would dispatch next.

    Its requests must be finished afterwards: the engine knows nothing of these steps.
    """
    scheduled = core.scheduler.schedule()
    assert scheduled is not None and not scheduled.admissions
    plan = jax.device_put(_plan(core, scheduled))
    program = core.programs.step(scheduled.bucket)
    before = _requests(core.state)
    computed = np.asarray(core.state.computed)
    rounds = []
    steps = min(steps, MOST_STEPS)
    for _ in range(ROUNDS):
        states = [jax.tree.map(jnp.copy, before) for _ in range(steps)]
        jax.block_until_ready((core.state, states))
        begin = time.perf_counter()
        for requests in states:
            state = dataclasses.replace(core.state, **requests)
            core.state, output = program(core.params, state, plan)
        jax.block_until_ready(output)
        rounds.append(1e3 * (time.perf_counter() - begin) / steps)
    return BareStep(
        milliseconds=statistics.median(rounds),
        rows=scheduled.bucket,
        parts=tuple(
            Part(int(computed[row.slot]) + row.num_rows, row.num_rows, row.samples)
            for row in scheduled.requests
        ),
    )


def _plan(core: EngineCore, scheduled: ScheduledStep) -> StepPlan:
    plan = empty_plan(core.programs.buckets[scheduled.bucket], core.config.max_num_seqs)
    entries: list[tuple[int, int, int, int]] = []
    for index, row in enumerate(scheduled.requests):
        plan.slot[index] = row.slot
        plan.rows[index] = row.num_rows
        plan.capacity[index] = row.capacity
        for group, new in enumerate(row.entries):
            entries.extend((group, row.slot, column, page) for column, page in new)
    if entries:
        plan.entries[: len(entries)] = entries
    return plan


def _requests(state: EngineState) -> dict[str, Any]:
    """Copies of what a step changes of the requests; pages are left as they are, because a
    repeated step writes the same values again."""
    kept = ("pages", "sampling", "row_states", "row_targets")
    return {
        field.name: jax.tree.map(jnp.copy, getattr(state, field.name))
        for field in dataclasses.fields(state)
        if field.name not in kept
    }
