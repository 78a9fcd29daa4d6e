"""Bytes and operations of a step against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from models_for_tests import write_tiny_llama

from mmtp_jax.bench.presets import ModelOptions
from mmtp_jax.bench.roofline import (
    Part,
    step_bytes,
    step_floor,
    step_flops,
)
from mmtp_jax.loader import LoadedModel
from pallas_kernels.bench.timing import Rates, measure_rates

INKLING = Path(__file__).resolve().parent.parent / "parity" / "goldens" / "inkling"
# The tiny model: hidden 32, vocabulary 64, two layers with 4/2 heads of 8 and an MLP of 48.
MATRICES = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
LAYER = MATRICES + 2 * 32
BIASES = 32 + 2 * 16
HEAD = 32 * 64
MODULE_MATRICES = MATRICES + 64 * 32
MODULE = MODULE_MATRICES + BIASES + 5 * 32
CACHED = 2 * 2 * 8  # numbers per position and layer
TWO = (Part(context=10, rows=1, samples=True), Part(context=20, rows=1, samples=True))


def load(model: Path, k: int = 0) -> LoadedModel:
    return ModelOptions(str(model), "dummy", "float32", 0, {}, 1).load(k, max_model_len=64)


def bytes_of(loaded: LoadedModel, *parts: Part) -> int:
    return step_bytes(loaded.graph, loaded.params, parts)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_tiny_llama(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """With two modules, of three that the checkpoint ships."""
    return load(write_tiny_llama(tmp_path_factory.mktemp("mimo"), modules=3, family="mimo"), 2)


def test_bytes_of_a_dense_model(llama: LoadedModel) -> None:
    numbers = 2 * LAYER + 32 + HEAD  # layers, the last norm, the head
    numbers += 2 * 32  # a row of the embedding for each row of the step
    numbers += (10 + 20) * 2 * CACHED
    assert bytes_of(llama, *TWO) == 4 * numbers


def test_a_chunk_that_draws_nothing_needs_no_head(llama: LoadedModel) -> None:
    chunk = Part(context=30, rows=16, samples=False)
    assert bytes_of(llama, chunk) == 4 * (2 * LAYER + 32 + 16 * 32 + 30 * 2 * CACHED)


def test_a_tied_embedding_is_the_head(tmp_path: Path, llama: LoadedModel) -> None:
    tied = load(write_tiny_llama(tmp_path, tie_word_embeddings=True))
    assert bytes_of(tied, *TWO) == bytes_of(llama, *TWO)
    assert step_flops(tied.graph, TWO) == step_flops(llama.graph, TWO)


def test_bytes_with_modules(mimo: LoadedModel) -> None:
    numbers = 2 * (LAYER + BIASES) + 32 + 2 * MODULE
    numbers += 3 * HEAD  # the target's draws and two drafts
    numbers += 3 * 32
    numbers += 12 * (2 + 2) * CACHED
    assert bytes_of(mimo, Part(12, 3, True)) == 4 * numbers


def test_a_repeated_module_is_read_for_every_draft(tmp_path: Path) -> None:
    lone = load(write_tiny_llama(tmp_path, modules=1, family="mimo"), 3)
    numbers = 2 * (LAYER + BIASES) + 32 + 3 * MODULE
    numbers += 4 * HEAD + 4 * 32 + 12 * (2 + 3) * CACHED
    assert bytes_of(lone, Part(12, 4, True)) == 4 * numbers


def test_a_second_request_reads_its_windows_and_more_experts() -> None:
    """Six layers, five of them sliding (window 6); four have 6 experts of 12, two taken."""
    inkling = load(INKLING)
    part = Part(context=20, rows=1, samples=True)
    cached = 5 * 6 * 48 + 20 * 32  # sliding layers: 3 heads of 8; the global one: 2 heads
    convolved = 4 * (5 * (2 * 24 + 2 * 24) + (2 * 16 + 2 * 24))  # four taps
    experts = 4 * 6 * 3 * 24 * 12 * ((1 - (2 / 3) ** 2) - 1 / 3)
    difference = bytes_of(inkling, part, part) - bytes_of(inkling, part)
    assert difference == 4 * (24 + cached + convolved + round(experts))


def test_operations_of_a_dense_model(llama: LoadedModel) -> None:
    products = 2 * (2 * MATRICES + HEAD) * 2  # two rows
    attention = 2 * 2 * 4 * (8 + 8) * (10 + 20)
    assert step_flops(llama.graph, TWO) == products + attention


def test_operations_of_a_chunk_are_causal(llama: LoadedModel) -> None:
    chunk = Part(context=10, rows=3, samples=False)
    attention = 2 * 2 * 4 * (8 + 8) * (10 + 9 + 8)
    assert step_flops(llama.graph, (chunk,)) == 3 * 2 * 2 * MATRICES + attention


def test_operations_with_modules(mimo: LoadedModel) -> None:
    products = 3 * 2 * 2 * MATRICES  # three rows through two layers
    products += 2 * 2 * 2 * MODULE_MATRICES  # one row per module through both modules
    products += (3 + 2) * 2 * HEAD
    attention = 2 * 4 * (8 + 8) * (2 * (12 + 11 + 10) + 2 * (12 + 11))
    assert step_flops(mimo.graph, (Part(12, 3, True),)) == products + attention


def test_the_longer_bound_is_the_floor(llama: LoadedModel) -> None:
    size, work = bytes_of(llama, *TWO), step_flops(llama.graph, TWO)
    slow_memory = step_floor(llama.graph, llama.params, TWO, Rates(1e6, 1e15))
    assert (slow_memory.bytes, slow_memory.flops) == (size, work)
    assert (slow_memory.bound, slow_memory.milliseconds) == ("bytes", size / 1e3)
    slow_products = step_floor(llama.graph, llama.params, TWO, Rates(1e15, 1e6))
    assert (slow_products.bound, slow_products.milliseconds) == ("flops", work / 1e3)


def test_rates_are_plausible() -> None:
    rates = measure_rates(np.dtype("float32"))
    assert 1e7 < rates.bytes_per_second < 1e14
    assert 1e7 < rates.flops_per_second < 1e17
