"""The compiled step alone: one step of an engine, dispatched again and again.

Every repetition starts from what the requests were before the step (small arrays, copied in
advance), so each does the work of that step: the same rows, contexts, drafts and pages.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any, cast

import jax
import jax.numpy as jnp

from mmtp_jax.bench.batch import FixedBatch
from mmtp_jax.bench.roofline import Part
from mmtp_jax.engine.buckets import Bucket
from mmtp_jax.engine.plan import StepPlan
from mmtp_jax.engine.programs import Programs
from mmtp_jax.engine.request import Request
from mmtp_jax.engine.state import EngineState
from mmtp_jax.models.model import Params

ROUNDS = 3
# Steps of a round: each has a copy of the requests' arrays.
MOST_STEPS = 64
# What a repeated step writes again as it is: large, or of no request.
_KEPT = ("pages", "sampling", "row_states", "row_targets")


@dataclasses.dataclass(frozen=True)
class BareStep:
    """Median milliseconds of a step of `rows` rows, and the requests' parts in it."""

    milliseconds: float
    rows: int
    parts: tuple[Part, ...]


def bare_step(batch: FixedBatch, steps: int) -> BareStep:
    """Run one step of the batch, and measure repetitions of it. The batch can go on afterwards:
    the last repetition leaves the state that the step left."""
    core = batch.core
    programs = core.device.programs
    recorder = _Recorder(programs)
    device = core.device
    device.programs = cast(Programs, recorder)
    batch.steps(1)
    state = device.state  # once the step was called
    device.programs = programs
    step = recorder.step_call
    plan = jax.device_put(step.plan)
    rounds = []
    steps = min(steps, MOST_STEPS)
    for _ in range(ROUNDS):
        copies = [jax.tree.map(jnp.copy, step.requests) for _ in range(steps)]
        jax.block_until_ready((state, copies))
        begin = time.perf_counter()
        for requests in copies:
            state = dataclasses.replace(state, **requests)
            state, output = step.program(device.params, state, plan)
        jax.block_until_ready(output)
        rounds.append(1e3 * (time.perf_counter() - begin) / steps)
    device.state = state
    parts = tuple(_part(request) for request in core.scheduler.running)
    return BareStep(statistics.median(rounds), step.num_rows, parts)


def _part(request: Request) -> Part:
    """A request's part of the newest step in flight."""
    step = request.in_flight[-1]
    context = request.min_length + step.num_rows - 2 if step.samples else request.max_computed
    return Part(context, step.num_rows, step.samples)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A program, and what it was called with: of the state, copies of what it changes of the
    requests."""

    program: Any
    num_rows: int
    requests: dict[str, Any]
    plan: StepPlan


class _Recorder:
    """Stands in for an engine's programs, and remembers the last call of a step."""

    step_call: _Call

    def __init__(self, programs: Programs) -> None:
        self._programs = programs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._programs, name)

    def step(self, bucket: Bucket, *, collect: bool = False) -> Any:
        program = self._programs.step(bucket, collect=collect)

        def call(params: Params, state: EngineState, plan: StepPlan) -> Any:
            requests = {
                field.name: jax.tree.map(jnp.copy, getattr(state, field.name))
                for field in dataclasses.fields(state)
                if field.name not in _KEPT
            }
            self.step_call = _Call(program, bucket.num_rows, requests, plan)
            return program(params, state, plan)

        return call
