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
from engine.suite import Exactness, built

MODELS = {
    "inkling": inkling,
    "inkling-shared-norm": inkling_shared_norm,
    "mimo-v2": mimo_v2,
    "step": step,
    "deepseek": deepseek,
    "glm": glm,
    "repeated-glm": functools.partial(repeated_glm, 4),
}


@pytest.fixture(scope="module", params=MODELS)
def engine(request: pytest.FixtureRequest) -> Harness:
    """Pages smaller than the number of modules."""
    return built(MODELS[request.param], 2)


class TestFamilies(Exactness):
    pass
