"""The engine's step on an H200, as compiled: one CUDA graph that updates the pages in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from aot.programs import (
    Compiled,
    compile_admission,
    compile_step,
    inkling,
    needs_compiler,
    of_one_layer,
    smollm2,
)

from mmtp_jax.engine.programs import ADMISSIONS_PER_CALL
from mmtp_jax.specs import ModelConfig

pytestmark = needs_compiler

MIB = 1 << 20


@dataclass(frozen=True)
class Program:
    """What to compile, and the scratch memory it may take (a quarter more than it did when
    written; cuBLAS, which computes the products of more rows than "decode" has, asks for up to
    32 MiB of it)."""

    compile: Callable[[], Compiled]
    temp: float


PROGRAMS = {
    "decode": Program(lambda: compile_step(smollm2(3, 0)), 4.1 * MIB),
    "windows of eight modules": Program(lambda: compile_step(smollm2(2, 8)), 37 * MIB),
    "windows and a chunk": Program(lambda: compile_step(smollm2(2, 2), chunk=512), 47 * MIB),
    "inkling": Program(lambda: compile_step(inkling()), 16 * MIB),
}


@pytest.fixture(scope="module", params=PROGRAMS)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def compiled(name: str) -> Compiled:
    return PROGRAMS[name].compile()


def test_is_one_graph(compiled: Compiled) -> None:
    """The host launches a graph and nothing else."""
    assert compiled.report.by_host == ()
    assert compiled.report.graphs == 1


def test_runs_straight_through(compiled: Compiled) -> None:
    """No loop, no conditional, no sort of the vocabulary."""
    assert compiled.report.branching == ()
    assert compiled.report.sorts(compiled.vocab_size) == []


def test_updates_in_place(compiled: Compiled) -> None:
    for array in compiled.page_arrays():
        assert compiled.report.rewrites(array) == []
        assert compiled.report.rewrites(of_one_layer(array)) == []
    assert compiled.report.aliased >= compiled.state_bytes()


def test_takes_little_scratch_memory(name: str, compiled: Compiled) -> None:
    assert compiled.report.temp <= PROGRAMS[name].temp


def test_spills_no_registers(name: str, compiled: Compiled) -> None:
    report = compiled.report
    assert report.named("ragged_paged_attention")
    assert report.named("rotate_and_write" if name != "inkling" else "kv_write")
    assert report.named("choose_token")
    assert report.spilling == ()


@pytest.mark.parametrize("name", ["decode"], indirect=True, scope="module")
def test_few_kernels_per_layer(compiled: Compiled) -> None:
    """Four products from one attention to the next, and at most five kernels beside them. (Layers
    after the first are alike: it adds to embeddings.)"""
    names = [thunk.name or thunk.kind for thunk in compiled.report.thunks]
    attention = [i for i, name in enumerate(names) if name.startswith("ragged_paged_attention")]
    between = names[attention[-2] + 1 : attention[-1]]
    products = [name for name in between if name.startswith("gemm")]
    assert len(products) == 4, between
    assert len(between) - len(products) <= 5, between


@pytest.mark.parametrize("config", [smollm2(2, 2), inkling()], ids=["smollm2", "inkling"])
def test_requests_enter_in_place_in_one_graph(config: ModelConfig) -> None:
    compiled = compile_admission(config, ADMISSIONS_PER_CALL)
    assert compiled.report.graphs == 1 and compiled.report.by_host == ()
    for array in compiled.page_arrays():
        assert compiled.report.rewrites(array) == []
    assert compiled.report.aliased >= compiled.state_bytes()
    assert compiled.report.temp <= 8 * MIB
