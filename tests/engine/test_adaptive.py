"""An engine that chooses draft lengths itself: what it settles on, with the text as it was."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
from engine.canary import canary, canary_values, counting
from engine.harness import Harness

from mmtp_jax.adaptive.controller import DraftController
from mmtp_jax.adaptive.costs import Program, StepCosts
from mmtp_jax.engine.draft_lengths import DraftLengths
from mmtp_jax.engine.warm_up import time_programs
from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.scoring import Scorer

DEPTH = 4
RIGHT = tuple(range(DEPTH))
WRONG = (1, 0, 3, 2)
LONG = SamplingParams(temperature=0.0, max_tokens=70)
Seconds = Callable[[Program], float]


@functools.cache
def built(order: tuple[int, ...]) -> Harness:
    return Harness(
        canary(DEPTH),
        values=canary_values(list(order)),
        num_pages=128,
        max_model_len=96,
        budget=32,
        behind=DEPTH + 5,
        controlled=True,
    )


def engine(order: tuple[int, ...], seconds: Seconds) -> Harness:
    """Modules in an order, and steps that are said to take so long; nothing is known yet."""
    made = built(order)
    made.reset()
    programs = [bucket.program for bucket in made.core.device.programs.buckets]
    costs = StepCosts({program: seconds(program) for program in programs})
    lengths = made.core.scheduler.draft_policy
    assert isinstance(lengths, DraftLengths)
    lengths._controller = DraftController(made.max_num_seqs, DEPTH, programs, costs)
    return made


def cheap(program: Program) -> float:
    return 1.0 + 0.05 * program.depth


def dear(program: Program) -> float:
    return 1.0 + 2.0 * program.depth


def test_times_of_programs_are_taken_before_there_are_requests() -> None:
    made = engine(RIGHT, cheap)
    ids = counting(1, 5)
    made.add(ids, SamplingParams(temperature=0.0, max_tokens=9))
    made.step()
    buckets = made.core.device.programs.buckets
    times = time_programs(made.core.device, buckets)
    assert times.keys() == {bucket.program for bucket in buckets}
    assert {program.depth for program in times} == {0, 1, DEPTH} and min(times.values()) > 0
    made.run()  # and they changed nothing


@pytest.fixture(autouse=True)
def costs_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What steps really take here says nothing."""
    monkeypatch.setattr(StepCosts, "observe", lambda *arguments: None)


def drafted(made: Harness) -> list[int]:
    """Drafts verified by every step of every request, texts checked."""
    texts = {}
    for start in range(1, 9):
        ids = counting(start, 3 * start)
        texts[made.add(ids, LONG)] = counting(4 * start, 70)
    made.run()
    assert made.output == texts
    return [delta.drafted for delta in made.deltas]


def test_all_drafts_where_they_pay() -> None:
    counts = drafted(engine(RIGHT, cheap))
    assert counts.count(DEPTH) > 0.6 * len(counts)


def test_none_where_they_cost_too_much() -> None:
    counts = drafted(engine(RIGHT, dear))
    assert counts.count(0) > 0.8 * len(counts)


def test_scores_are_of_all_modules_whatever_prefills_leave_out() -> None:
    made = engine(RIGHT, cheap)
    lengths = made.core.scheduler.draft_policy
    assert isinstance(lengths, DraftLengths)
    lengths._controller._prefill_depth = 0
    ids = counting(1, 20)
    scorer = Scorer(len(ids), made.core.graph.config)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    made.core.add("scored", ids, params, 0, collector=scorer.collect)
    made.output["scored"] = []
    made.run()
    logits = scorer.result()["mtp_logits"]
    for module in range(DEPTH):
        # A canary's module knows nothing at the first position.
        likely = np.argmax(logits[module, 1 : 19 - DEPTH], axis=1)
        assert likely.tolist() == ids[3 + module : 3 + module + len(likely)]


@pytest.mark.slow
def test_none_where_modules_are_wrong() -> None:
    counts = drafted(engine(WRONG, cheap))
    assert counts.count(0) > 0.8 * len(counts)


def drafted_after_costs_fell(
    made: Harness, prompt: list[int], tokens: int, after: int, patch: pytest.MonkeyPatch
) -> list[int]:
    """A lone request's modules fall behind while drafts cost too much, up to so many tokens; what
    its later steps verify, its text checked."""
    name = made.add(prompt, SamplingParams(temperature=0.0, max_tokens=tokens))
    while len(made.output[name]) < after:
        made.step()
    patch.setattr(StepCosts, "seconds", lambda self, program: cheap(program))
    patch.setattr("mmtp_jax.adaptive.controller.RESTART_HORIZON", 8)
    made.deltas.clear()
    made.run()
    assert made.output[name] == counting(prompt[0] + len(prompt), tokens)
    return [delta.drafted for delta in made.deltas]


def test_requests_are_restarted_to_get_their_modules_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(RIGHT, dear)
    counts = drafted_after_costs_fell(made, counting(1, 5), 88, 20, monkeypatch)
    assert counts.count(DEPTH) >= 4


def test_no_request_is_restarted_where_pages_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmtp_jax.engine.draft_lengths.MOST_USAGE", 0.0)
    made = engine(RIGHT, dear)
    counts = drafted_after_costs_fell(made, counting(1, 20), 75, 30, monkeypatch)
    assert counts == [0] * len(counts)
