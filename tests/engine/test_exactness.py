"""Every wiring of modules is exact, and reuses what it may."""

from __future__ import annotations

import functools

import pytest
from engine.harness import Harness
from engine.models import chain, chain_pre, hybrid, narrow, plain, repeated, target_fed
from engine.suite import Exactness, built, limited, prompt

MODELS = {
    "chain-1": functools.partial(chain, 1),
    "chain-3": functools.partial(chain, 3),
    "chain-pre-2": functools.partial(chain_pre, 2),
    "target-fed-4": functools.partial(target_fed, 4),
    "hybrid-2": hybrid,
    "narrow-4": functools.partial(narrow, 4),
    "narrow-8": functools.partial(narrow, 8),
    "repeated-4": functools.partial(repeated, 4),
    "plain": plain,
}
PAGE_SIZES = {
    "chain-1": (4,),
    "target-fed-4": (4,),
    "hybrid-2": (16,),
    "plain": (4,),
}
# Those with pages of 2 that are not here run with draft lengths that vary; the family "step" has
# the wiring of "chain-pre".
MORE_PAGE_SIZES = {
    "chain-3": (4, 16),
    "chain-pre-2": (2, 4, 16),
    "target-fed-4": (2,),
    "hybrid-2": (2, 4),
    "narrow-4": (4,),
    "narrow-8": (4,),  # the canary has as many modules with windows as narrow
    "repeated-4": (4, 16),
}


def cases(sizes: dict[str, tuple[int, ...]]) -> list[str]:
    return [f"{name} page={size}" for name in sizes for size in sizes[name]]


CASES = [
    *cases(PAGE_SIZES),
    *(pytest.param(case, marks=pytest.mark.slow) for case in cases(MORE_PAGE_SIZES)),
]


@pytest.fixture(scope="module", params=CASES)
def engine(request: pytest.FixtureRequest) -> Harness:
    name, size = request.param.split(" page=")
    return built(MODELS[name], int(size))


class TestWirings(Exactness):
    pass


@pytest.mark.parametrize("engine", ["target-fed-4 page=4"], indirect=True)
def test_draft_counts_reach_every_module(engine: Harness) -> None:
    """A perfect script accepts all drafts: N+1 tokens per decode step."""
    engine.reset()
    ids = prompt(6)
    engine.generate(ids, limited(21))
    decodes = [delta for delta in engine.deltas if delta.drafted]
    assert [delta.accepted for delta in decodes] == [4, 4, 4, 4]


@pytest.mark.parametrize("engine", ["target-fed-4 page=4"], indirect=True)
def test_a_hit_maps_no_more_than_its_windows_read(engine: Harness) -> None:
    """Modules rewrite nothing below the hit, so no page in front of its window is needed."""
    engine.reset()
    ids = prompt(20)
    engine.generate(ids)
    engine.chunk = lambda request, limit: 1
    engine.deltas.clear()
    assert engine.generate([*ids[:18], 1]) == list(engine.text([*ids[:18], 1], 8))
    assert engine.deltas[0].num_cached_tokens == 12
