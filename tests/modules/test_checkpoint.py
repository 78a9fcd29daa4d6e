"""Folders of modules: what is saved comes back, and what is not whole is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from llm_for_tests import parameters
from modules_for_tests import MODULES, RECOMMENDED, load, store, write_whole

from mmtp_jax.config import ConfigError, engine_config
from mmtp_jax.loader import LoadedModel, load_model
from mmtp_jax.models.model import assemble, model_graph, random_value
from mmtp_jax.modules.checkpoint import open_modules, save_modules
from mmtp_jax.modules.storage import STORAGES, Storage
from mmtp_jax.specs import (
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    ModelConfig,
    MTPConfig,
    RopeConfig,
)
from mmtp_jax.weights.errors import ModelError

GOLDENS = Path(__file__).parents[1] / "parity" / "goldens"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_whole(tmp_path_factory.mktemp("whole")))


@pytest.fixture(scope="module")
def saved(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store(loaded, tmp_path_factory.mktemp("saved") / "modules")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy to damage."""
    yield shutil.copytree(saved, tmp_path / "modules")


def of_modules(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name.startswith("mtp.")}


def test_bfloat16_comes_back_exactly(loaded: LoadedModel, saved: Path) -> None:
    modules = open_modules(saved)
    assert modules.config == loaded.graph.config.mtp
    assert modules.names() == of_modules(loaded.graph.shapes())
    assert (modules.num_speculative_tokens, modules.storage) == (RECOMMENDED, "bfloat16")
    for name, value in of_modules(parameters(loaded)).items():
        got = modules.read(name)
        assert got.dtype == (np.float32 if got.ndim == 1 else ml_dtypes.bfloat16), name
        np.testing.assert_array_equal(got.astype(np.float32), value, err_msg=name)
    identity = modules.identity
    assert identity.config.num_modules == 0
    identity.check_architecture(loaded.graph.config)
    np.testing.assert_array_equal(identity.final_norm, parameters(loaded)["norm.scale"])


def test_parameters_in_bfloat16(tmp_path: Path) -> None:
    loaded = load(write_whole(tmp_path / "whole"), dtype="bfloat16")
    modules = open_modules(store(loaded, tmp_path / "modules"))
    for name, value in of_modules(parameters(loaded)).items():
        assert modules.read(name).dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(modules.read(name).astype(np.float32), value, err_msg=name)


def test_int8_and_facts(loaded: LoadedModel, tmp_path: Path) -> None:
    facts = {"steps": 1000, "data": ["a", None, {"tokens": 1.5e9}]}
    folder = store(loaded, tmp_path / "modules", "int8", facts=facts, num_speculative_tokens=3)
    modules = open_modules(str(folder))
    assert (modules.facts, modules.num_speculative_tokens) == (facts, 3)
    assert modules.names() == of_modules(loaded.graph.shapes())
    for name, value in of_modules(parameters(loaded)).items():
        step = np.abs(value).max(axis=-2, keepdims=True) / 127 if value.ndim > 1 else 0.0
        assert (np.abs(modules.read(name) - value) <= 0.504 * step).all(), name


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("family", ["glm4_moe", "inkling", "step3p5"])
def test_experts_convolutions_and_own_heads(family: str, storage: Storage, tmp_path: Path) -> None:
    config = engine_config(str(GOLDENS / family), None, num_pages=64, max_model_len=32)
    loaded = load_model(config)
    folder = store(loaded, tmp_path / "modules", storage, num_speculative_tokens=1)
    modules = open_modules(folder)
    assert modules.config == loaded.graph.config.mtp
    kept = {name for leaf in loaded.graph.leaves() if leaf.float32 for name in leaf.names}
    for name, value in of_modules(parameters(loaded)).items():
        got = modules.read(name).astype(np.float32)
        bound = 0.0 if name in kept or value.ndim < 2 else np.abs(value).max() / 127
        assert got.shape == value.shape and np.abs(got - value).max() <= bound, name


def test_size_of_modules_for_smollm2(tmp_path: Path) -> None:
    """Eight must stay below 34 MB, so two below a quarter of that; random values."""
    attention = AttentionSpec(9, 3, 64, rope=RopeConfig(64))
    layer = LayerSpec(attention, DenseSpec(1536))
    graph = model_graph(ModelConfig("llama", 64, 576, (layer,), 8192, mtp=MTPConfig((layer,) * 2)))
    params = assemble(graph, random_value(graph, 0, np.dtype(np.float32)))
    settings: dict[str, Any] = {"storage": "int8", "num_speculative_tokens": 2, "facts": {}}
    save_modules(tmp_path / "modules", graph, params, **settings)
    sizes = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(sizes) < 34e6 / 4 and max(sizes) < 6e6


def test_a_repeated_module_is_stored_once(tmp_path: Path) -> None:
    loaded = load(write_whole(tmp_path / "whole", modules=1), {"num_speculative_tokens": 3})
    assert loaded.graph.config.mtp is not None and loaded.graph.config.mtp.repeats == 3
    modules = open_modules(store(loaded, tmp_path / "modules", num_speculative_tokens=1))
    assert (modules.config.num_modules, modules.config.repeats) == (1, 1)


# --- saving ---


@pytest.mark.parametrize("count", [0, MODULES + 1])
def test_a_recommendation_beyond_the_modules(
    loaded: LoadedModel, tmp_path: Path, count: int
) -> None:
    with pytest.raises(ConfigError, match=rf"must be in \[1, 3\], one per module, got {count}"):
        store(loaded, tmp_path / "modules", num_speculative_tokens=count)
    assert not list(tmp_path.iterdir())


def test_nothing_to_save_or_nowhere(loaded: LoadedModel, saved: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"storage": "int8", "num_speculative_tokens": 1, "facts": {}}
    before = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="exists already and is not an empty directory"):
        save_modules(saved, loaded.graph, loaded.params, **settings)
    assert before == {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    plain = load(write_whole(tmp_path / "whole"), {"num_speculative_tokens": 0})
    with pytest.raises(ConfigError, match="has none to save"):
        save_modules(tmp_path / "modules", plain.graph, plain.params, **settings)
    with pytest.raises(TypeError, match="not JSON serializable"):
        save_modules(
            tmp_path / "modules", loaded.graph, loaded.params, **settings | {"facts": {"a": {1}}}
        )
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write"):
        save_modules(tmp_path / "file" / "modules", loaded.graph, loaded.params, **settings)
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "file"}


def test_values_that_are_not_finite(loaded: LoadedModel, tmp_path: Path) -> None:
    broken = [
        jnp.full_like(param, jnp.nan) if "mtp.0.fuse.kernel" in leaf.names else param
        for leaf, param in zip(loaded.graph.leaves(), loaded.params, strict=True)
    ]
    settings: dict[str, Any] = {"storage": "int8", "num_speculative_tokens": 1, "facts": {}}
    with pytest.raises(ConfigError, match=r"mtp\.0\.fuse\.kernel holds values that are not finite"):
        save_modules(tmp_path / "modules", loaded.graph, tuple(broken), **settings)


def test_an_interrupted_save_leaves_nothing(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ocp.Checkpointer, "save", fail)
    with pytest.raises(KeyboardInterrupt):
        store(loaded, tmp_path / "modules")
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    (tmp_path / "modules").mkdir()  # an empty one is taken
    save_modules(
        tmp_path / "modules",
        loaded.graph,
        loaded.params,
        storage="int8",
        num_speculative_tokens=1,
        facts={},
    )
    assert [path.name for path in tmp_path.iterdir()] == ["modules"]
    open_modules(tmp_path / "modules")


# --- what is refused ---


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "modules.json"
    description = json.loads(path.read_text())
    change(description)
    path.write_text(json.dumps(description))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format=2), r"modules\.json is of format 2, but only 1 is implemented"),
        (lambda d: d.pop("format"), r"modules\.json lacks the key 'format'"),
        (lambda d: d.pop("storage"), r"modules\.json lacks the key 'storage'"),
        (lambda d: d.update(storage="int4"), r"modules\.json is damaged: storage must be one of"),
        (lambda d: d.update(num_speculative_tokens=4), r"must be in \[1, 3\].* got 4"),
        (lambda d: d.update(num_speculative_tokens="2"), "which is not an integer"),
        (lambda d: d.update(facts=None), r"lacks the object 'facts'"),
        (lambda d: d.update(target=[]), r"lacks the object 'target'"),
        (lambda d: d.update(mtp=d["target"]), "is damaged: there is no MTPConfig"),
        (lambda d: d["mtp"].update(feed="sideways"), "is damaged: feed must be one of"),
        (lambda d: d["mtp"].update(frobnicate=3), "is damaged: .*frobnicate"),
        (lambda d: d["target"].pop("is"), "is damaged: 'is'"),
        (
            lambda d: d["mtp"]["modules"][0]["of"]["mlp"].update(size=64),
            r"holds mtp\.0\.layer\.mlp\.down\.kernel of shape \(48, 32\), but .* \(64, 32\)",
        ),
        (
            lambda d: d["mtp"]["modules"][0].update(count=2),
            r"holds mtp\.2\.fuse\.kernel of shape \(64, 32\), but .* calls for no such array",
        ),
        (
            lambda d: d["mtp"]["modules"][0].update(count=4),
            r"holds mtp\.3\.fuse\.kernel of shape \(absent\), but .* calls for \(64, 32\)",
        ),
        (lambda d: d.update(storage="int8"), "block_scale of shape .absent."),
    ],
)
def test_descriptions_that_do_not_fit(
    folder: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    edit(folder, change)
    with pytest.raises(ModelError, match=message):
        open_modules(folder)


def test_folders_that_are_not_whole(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no folder of MTP modules at nowhere"):
        open_modules("nowhere")
    with pytest.raises(ModelError, match=r"there is no folder|cannot look for the modules"):
        open_modules("n" * 5000)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"empty has no modules\.json"):
        open_modules(tmp_path / "empty")
    text = (folder / "modules.json").read_text()
    (folder / "modules.json").write_text(text[: len(text) // 2])
    with pytest.raises(ModelError, match=r"modules\.json is not readable JSON"):
        open_modules(folder)
    (folder / "modules.json").write_text(text)
    shutil.rmtree(folder / "parameters")
    with pytest.raises(ModelError, match="modules is not whole: cannot read parameters/"):
        open_modules(folder)
    edit(folder, lambda d: d.update(crc32={}))
    with pytest.raises(ModelError, match="parameters is missing, half-written or damaged"):
        open_modules(folder)


def test_data_that_is_not_whole(folder: Path) -> None:
    for file in sorted((folder / "parameters").rglob("d/*")):
        content = file.read_bytes()
        flipped = bytes([content[-1] ^ 1])
        for damaged in (content[: len(content) // 2], content[:-1] + flipped):
            file.write_bytes(damaged)
            with pytest.raises(
                ModelError, match=r"is damaged: parameters/.* is not what was saved"
            ):
                open_modules(folder)
        file.unlink()
        with pytest.raises(ModelError, match="is not whole: cannot read parameters/"):
            open_modules(folder)
        file.write_bytes(content)
    open_modules(folder)
