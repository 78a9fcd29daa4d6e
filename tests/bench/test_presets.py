"""The models that the benchmark knows by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from models_for_tests import write_tiny_llama

from mmtp_jax.bench.presets import ARCHITECTURES, ModelOptions, loadable
from mmtp_jax.describe import count_parameters
from mmtp_jax.models.model import model_graph
from mmtp_jax.specs import AttentionSpec, DenseSpec, ModelConfig, MoESpec
from mmtp_jax.tokenizer import load_tokenizer
from mmtp_jax.weights.checkpoint import open_checkpoint
from mmtp_jax.weights.resolve import DEFAULT_MODEL

DUMMY = ModelOptions("", "dummy", "float32", 0, {}, 1)


def described(name: str) -> ModelConfig:
    with loadable(name, "auto") as (folder, load_format):
        assert load_format == "dummy" and load_tokenizer(Path(folder)) is None
        return open_checkpoint(Path(folder), with_weights=False).config


def test_llama3_8b_is_the_released_shape() -> None:
    assert count_parameters(model_graph(described("llama3-8b"))) == (8_030_261_248, 0)


def test_inkling_2b_has_all_that_inkling_has() -> None:
    model = described("inkling-2b")
    assert 1.9e9 < sum(count_parameters(model_graph(model))) < 2.1e9
    assert model.num_modules == 8
    windows = set()
    for layer in model.layers:
        assert layer.conv_taps and isinstance(layer.attention, AttentionSpec)
        assert layer.attention.relative is not None
        windows.add(layer.attention.window)
    assert windows == {None, 512}
    assert {type(layer.mlp) for layer in model.layers} == {DenseSpec, MoESpec}


def test_other_names_are_left_to_the_loader() -> None:
    with loadable("smollm2-135m", "auto") as found:
        assert found == (DEFAULT_MODEL, "auto")
    with loadable("some/where", "dummy") as found:
        assert found == ("some/where", "dummy")


def test_the_folder_of_an_architecture_is_removed() -> None:
    with loadable(next(iter(ARCHITECTURES)), "auto") as (folder, _):
        assert [path.name for path in Path(folder).iterdir()] == ["config.json"]
    assert not Path(folder).exists()


@pytest.mark.parametrize(("modules", "expected"), [(0, "dummy"), (2, "auto")])
def test_modules_are_random_only_where_there_are_none(
    tmp_path: Path, modules: int, expected: str
) -> None:
    path = write_tiny_llama(tmp_path, modules=modules, family="mimo" if modules else "llama")
    loaded = dataclasses.replace(DUMMY, model=str(path), load_format="auto").load(
        2, max_model_len=32
    )
    assert loaded.config.speculative.load_format == expected
    assert loaded.graph.config.num_modules == 2
    assert not loaded.config.cache.enable_prefix_caching
