"""Every family's modules are exact."""

from __future__ import annotations

import functools

import pytest
from engine.families import (
    deepseek,
    glm,
    inkling,
    inkling_shared_norm,
    mimo_v2,
    repeated_glm,
    step,
)
from engine.harness import Harness
from engine.models import VOCAB
from engine.suite import Exactness, built, prompt

MODELS = {
    "inkling": inkling,
    "inkling-shared-norm": inkling_shared_norm,
    "mimo-v2": mimo_v2,
    "step": step,
    "deepseek": deepseek,
    "glm": glm,
    "repeated-glm": functools.partial(repeated_glm, 4),
}
# What the variant with its modules' norm shared, the repeated module and goldens cover too.
COVERED = ("inkling", "glm")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.slow if name in COVERED else ()) for name in MODELS
    ],
)
def engine(request: pytest.FixtureRequest) -> Harness:
    """Pages smaller than the number of modules."""
    return built(MODELS[request.param], 2)


class TestFamilies(Exactness):
    pass


@pytest.mark.parametrize("engine", ["inkling-shared-norm"], indirect=True)
def test_padding_of_the_embedding_may_be_in_prompts_but_is_never_drawn(engine: Harness) -> None:
    engine.reset()
    ids = [VOCAB, *prompt(5), VOCAB + 7]
    assert max(engine.generate(ids, wrong=None)) < VOCAB
    assert engine.output == {name: list(engine.text(ids, 8)) for name in engine.output}
