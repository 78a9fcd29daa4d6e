"""Draft lengths vary from step to step and from request to request, and everything stays exact."""

from __future__ import annotations

import functools

import pytest
from engine.harness import Harness
from engine.models import chain, hybrid, narrow, repeated, target_fed
from engine.suite import Exactness, built, limited, prompt

from mmtp_jax.engine.request import Drafts, Request

MODELS = {
    "chain-3": functools.partial(chain, 3),
    "target-fed-4": functools.partial(target_fed, 4),
    "hybrid-2": hybrid,
    "narrow-4": functools.partial(narrow, 4),
    "repeated-4": functools.partial(repeated, 4),
}
IN_CI = ("narrow-4", "repeated-4")  # these have windows and convolutions
# Positions that modules may fall behind: a few steps of these small requests.
BEHIND = 9


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow) for name in MODELS],
)
def engine(request: pytest.FixtureRequest) -> Harness:
    return built(MODELS[request.param], 2, BEHIND)


class TestDraftLengths(Exactness):
    pass


def propose(engine: Harness, count: int) -> None:
    engine.drafts = lambda request: Drafts(count, count)


def test_modules_that_were_left_out_come_back(engine: Harness) -> None:
    """After some steps without them, as long as they are within reach."""
    engine.reset()
    ids, count = prompt(6), engine.model.num_drafts
    name = engine.add(ids, limited(30))
    for drafts, steps in ((count, 3), (0, 5), (count, 2), (1, 2), (count, 20)):
        propose(engine, drafts)
        for _ in range(steps):
            engine.step()
    engine.run()
    assert engine.output[name] == list(engine.text(ids, 30))
    accepted = [delta.accepted for delta in engine.deltas if delta.request_id == name]
    assert accepted[:4] == [0, count, count, 0]
    later = accepted[4:]
    assert later[later.index(count) :][:2] == [count, 1]


def test_modules_beyond_reach_stay_out_until_a_restart(engine: Harness) -> None:
    engine.reset()
    ids, count = prompt(6), engine.model.num_drafts
    name = engine.add(ids, limited(40))
    propose(engine, 0)
    for _ in range(BEHIND + 6):
        engine.step()
    propose(engine, count)
    engine.deltas.clear()
    for _ in range(4):
        engine.step()
    assert [delta.drafted for delta in engine.deltas] == [0] * len(engine.deltas)
    engine.core.scheduler.restart(engine.core.scheduler.running[0])
    engine.deltas.clear()
    engine.run()
    assert engine.output[name] == list(engine.text(ids, 40))
    assert max(delta.accepted for delta in engine.deltas) == count


def test_what_left_out_modules_lack_is_not_reused(engine: Harness) -> None:
    engine.reset()
    ids = prompt(9)
    propose(engine, 0)
    text = engine.generate(ids, limited(20))
    engine.drafts = None
    again = [*ids, *text, *prompt(3, seed=1)]
    name = engine.add(again, limited(8))
    engine.run()
    assert engine.output[name] == list(engine.text(again, 8))
    cached = next(delta for delta in engine.deltas if delta.request_id == name).num_cached_tokens
    assert 0 < cached <= len(ids)


def test_requests_of_a_step_have_lengths_of_their_own(engine: Harness) -> None:
    engine.reset()
    count = engine.model.num_drafts

    def draft(request: Request) -> Drafts:
        own = int(request.request_id[-1]) % (count + 1)
        return Drafts(own, own)

    engine.drafts = draft
    texts = {}
    for seed in range(3):
        ids = prompt(5 + seed, seed)
        texts[engine.add(ids, limited(20))] = list(engine.text(ids, 20))
    engine.run()
    assert engine.output == texts
    for name in texts:
        drafted = [delta.drafted for delta in engine.deltas if delta.request_id == name]
        assert max(drafted[2:]) == int(name[-1]) % (count + 1)


def test_prefills_with_some_modules_serve_requests_that_need_no_more(engine: Harness) -> None:
    """Pages hold what ran; who needs more computes them again, for the others too."""
    engine.reset()
    modules, count = engine.model.num_modules, engine.model.num_drafts
    ids = prompt(14)
    reused, drafted = {}, {}
    for depth in (1, 1, modules, modules, 1, 0):
        engine.depth = lambda request, depth=depth: depth
        engine.deltas.clear()
        assert engine.generate(ids, limited(12)) == list(engine.text(ids, 12))
        first = engine.deltas[0]
        reused.setdefault(depth, []).append(first.num_cached_tokens)
        drafted[depth] = max(delta.drafted for delta in engine.deltas)
    assert reused[1][0] == 0 < reused[1][1] <= reused[1][2]
    if modules > 1:
        assert reused[modules][:2] == [0, reused[1][2]]
    assert reused[0][0] >= reused[1][-1]
    assert drafted == {0: 0, 1: 1 if modules > 1 else count, modules: count}
