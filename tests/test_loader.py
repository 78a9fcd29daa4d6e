"""From a model name to parameters: which modules are built, what is refused, what is random."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llm_for_tests import MODULES, OPTIONS, PLAIN, checkpoint_values, load_tiny, parameters
from models_for_tests import tiny_config, write_tiny_llama

from mmtp_jax import loader
from mmtp_jax.config import ConfigError, SpeculativeConfig, engine_config
from mmtp_jax.llm import LLM
from mmtp_jax.loader import LoadedModel, load_model, warn_about_unused_gpu
from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.specs import AttentionSpec, DenseSpec, LayerSpec, MTPConfig


@pytest.fixture(scope="module")
def without_modules(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A llama directory: no MTP modules, no tokenizer."""
    return str(write_tiny_llama(tmp_path_factory.mktemp("llama")))


def load(model: str, speculative: dict | None = None, **options: object) -> LoadedModel:
    return load_model(engine_config(model, speculative, **(OPTIONS | options)))


def assert_equals_checkpoint(loaded: LoadedModel, modules: int) -> None:
    """Exactly the target's and the first `modules` modules' tensors, each in its place."""
    wanted = {
        name: value
        for name, value in checkpoint_values().items()
        if not name.startswith("mtp.") or int(name.split(".")[1]) < modules
    }
    got = parameters(loaded)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


# --- how many modules ---


@pytest.mark.parametrize(
    ("shipped", "config", "modules", "multi"),  # one that is repeated is no multi-module MTP
    [
        (0, {}, 0, False),
        (1, {}, 1, False),
        (1, {"num_speculative_tokens": 4}, 1, False),
        (2, {}, 2, True),
        (3, {}, 3, True),
        (3, {"num_speculative_tokens": 0}, 0, False),
        (0, {"num_speculative_tokens": "auto"}, 0, False),
        (1, {"num_speculative_tokens": "auto"}, 1, False),
        (3, {"num_speculative_tokens": "auto"}, 3, True),
        (3, {"num_speculative_tokens": 1}, 1, False),
        (3, {"num_speculative_tokens": 2}, 2, True),
        (3, {"num_speculative_tokens": 3}, 3, True),
        (3, {"method": None}, 0, False),
        (3, {"method": None, "num_speculative_tokens": 3}, 0, False),
        (0, {"load_format": "dummy"}, 1, False),
        (0, {"load_format": "dummy", "num_speculative_tokens": 1}, 1, False),
        (0, {"load_format": "dummy", "num_speculative_tokens": 4}, 4, True),
        (3, {"load_format": "dummy"}, 3, True),
        (3, {"load_format": "dummy", "num_speculative_tokens": 2}, 2, True),
    ],
)
def test_use_multi_module_mtp(shipped: int, config: dict, modules: int, multi: bool) -> None:
    layer = LayerSpec(AttentionSpec(1, 1, 2), DenseSpec(4))
    mtp = MTPConfig((layer,) * shipped) if shipped else None
    resolved = SpeculativeConfig(**config).resolved(mtp)
    assert resolved.num_modules == modules
    assert resolved.use_multi_module_mtp() is multi


@pytest.mark.parametrize("wanted", [None, "auto"])
def test_modules_recommend_how_many_to_use(wanted: Literal["auto"] | None) -> None:
    mtp = MTPConfig((LayerSpec(AttentionSpec(1, 1, 2), DenseSpec(4)),) * 5)
    resolved = SpeculativeConfig(num_speculative_tokens=wanted).resolved(mtp, recommended=2)
    assert resolved.num_modules == resolved.num_speculative_tokens == 2
    assert resolved.adaptive is (wanted == "auto")


@pytest.mark.parametrize("k", [None, 3, 2, 1])
def test_first_modules_are_loaded(k: int | None) -> None:
    loaded = load_tiny({"num_speculative_tokens": k})
    count = MODULES if k is None else k
    assert loaded.graph.config.num_modules == count
    assert loaded.config.speculative.num_speculative_tokens == count
    assert loaded.config.speculative.use_multi_module_mtp() is (count > 1)
    assert_equals_checkpoint(loaded, count)


def test_a_lone_module_is_repeated(tmp_path: Path) -> None:
    model = str(write_tiny_llama(tmp_path, family="mimo", modules=1))
    once, often = (load(model, {"num_speculative_tokens": k}) for k in (1, 3))
    config = often.graph.config
    assert config.mtp is not None
    assert (config.num_modules, config.mtp.repeats, config.num_drafts) == (1, 3, 3)
    assert parameters(often).keys() == parameters(once).keys()
    for name, value in parameters(once).items():
        np.testing.assert_array_equal(parameters(often)[name], value, err_msg=name)


@pytest.mark.parametrize("speculative", [PLAIN, {"num_speculative_tokens": 0}])
def test_speculation_off_loads_no_module(speculative: dict) -> None:
    loaded = load_tiny(speculative)
    assert loaded.graph.config.mtp is None
    assert not loaded.config.speculative.use_multi_module_mtp()
    assert_equals_checkpoint(loaded, 0)


def test_more_tokens_than_modules_are_refused(without_modules: str) -> None:
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=4 exceeds the 3 MTP module"):
        load_tiny({"num_speculative_tokens": 4})
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=4 exceeds the 3 MTP module"):
        load_tiny({"num_speculative_tokens": 4, "load_format": "dummy"})
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=1 exceeds the 0 MTP module"):
        load(without_modules, {"num_speculative_tokens": 1})


# --- random weights ---


def test_random_modules_for_a_checkpoint_without_any(without_modules: str) -> None:
    plain = parameters(load(without_modules))
    loaded = load(without_modules, {"num_speculative_tokens": 3, "load_format": "dummy"})
    config = loaded.graph.config
    assert config.mtp is not None and config.mtp.modules == (config.layers[-1],) * 3
    values = parameters(loaded)
    for name, value in plain.items():
        np.testing.assert_array_equal(values[name], value, err_msg=name)
    assert {name.split(".")[1] for name in values.keys() - plain.keys()} == {"0", "1", "2"}
    assert not np.array_equal(values["mtp.0.fuse.kernel"], values["mtp.1.fuse.kernel"])
    assert all(np.isfinite(value).all() for value in values.values())


def test_random_modules_instead_of_the_ones_shipped() -> None:
    values = parameters(load_tiny({"load_format": "dummy", "num_speculative_tokens": 2}))
    for name, value in checkpoint_values().items():
        if not name.startswith("mtp."):
            np.testing.assert_array_equal(values[name], value, err_msg=name)
    for module in range(2):
        shipped = checkpoint_values()[f"mtp.{module}.fuse.kernel"]
        assert not np.array_equal(values[f"mtp.{module}.fuse.kernel"], shipped)


def test_a_whole_random_model_needs_only_its_config(tmp_path: Path) -> None:
    config = json.dumps(tiny_config("mimo", modules=2))
    (tmp_path / "config.json").write_text(config)
    first = load(str(tmp_path), load_format="dummy")
    assert first.tokenizer is None and first.graph.config.num_modules == 2
    again, other = (load(str(tmp_path), load_format="dummy", seed=seed) for seed in (0, 1))
    values, same, different = parameters(first), parameters(again), parameters(other)
    assert values.keys() == same.keys() == different.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(value, same[name], err_msg=name)
    assert not np.array_equal(values["embed.weight"], different["embed.weight"])


# --- what else is configured ---


def test_max_model_len(without_modules: str) -> None:
    assert load(without_modules).max_model_len == OPTIONS["max_model_len"]
    assert load(without_modules, max_model_len=512, num_pages=200).max_model_len == 512
    with pytest.raises(ConfigError, match=r"max_model_len must be <= 512 .* got 513"):
        load(without_modules, max_model_len=513)


@pytest.mark.parametrize(("num_pages", "fits"), [(300, 512), (41, 160)])
def test_max_model_len_fits_model_and_cache(
    without_modules: str, num_pages: int, fits: int
) -> None:
    loaded = load(without_modules, max_model_len=None, num_pages=num_pages)
    assert loaded.max_model_len == fits


@pytest.mark.parametrize("name", ["max_model_length", "cache", "model", "speculative"])
def test_unknown_options_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no engine option '{name}'"):
        engine_config("any", None, **{name: 8})


@pytest.mark.parametrize("name", ["num_tokens", "modules_in_checkpoint"])
def test_unknown_speculative_fields_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no speculative_config field '{name}'"):
        engine_config("any", {"method": "mtp", name: 3})


def test_options_reach_their_configuration() -> None:
    fields = {"num_speculative_tokens": 2, "load_format": "dummy"}
    config = engine_config("any", fields, page_size=8, max_num_seqs=3, seed=7)
    assert (config.cache.page_size, config.max_num_seqs, config.seed) == (8, 3, 7)
    assert config.speculative == SpeculativeConfig(**fields)
    assert engine_config("any", SpeculativeConfig(method=None)).speculative.method is None


def test_bfloat16_runs() -> None:
    bfloat16 = jnp.dtype("bfloat16")
    loaded = load_tiny({}, dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.params)} == {bfloat16}
    for name, value in checkpoint_values().items():
        rounded = value.astype(bfloat16).astype(np.float32)
        np.testing.assert_array_equal(parameters(loaded)[name], rounded, err_msg=name)
    with LLM.from_loaded(loaded) as llm:
        assert {page.dtype for page in jax.tree.leaves(llm.core.device.state.pages)} == {bfloat16}
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1)
        (output,) = llm.generate("hello", params)
    assert len(output.token_ids) == 12
    for token, logprobs in zip(output.token_ids, output.logprobs or (), strict=True):
        assert (logprobs.top_ids, logprobs.top_values) == ((token,), (logprobs.chosen,))


@pytest.mark.parametrize(
    ("backend", "platforms", "device", "tool", "warned"),
    [
        ("cpu", None, True, None, True),
        ("cpu", "", False, "/usr/bin/nvidia-smi", True),
        ("cpu", "cuda,rocm", True, None, True),
        ("cpu", None, False, None, False),
        ("cpu", "cpu", True, "/usr/bin/nvidia-smi", False),
        ("gpu", None, True, "/usr/bin/nvidia-smi", False),
    ],
)
def test_unused_gpu_warning(
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    platforms: str | None,
    device: bool,
    tool: str | None,
    warned: bool,
) -> None:
    monkeypatch.setattr(loader.jax, "default_backend", lambda: backend)
    monkeypatch.setattr(type(jax.config), "jax_platforms", platforms)
    monkeypatch.setattr(loader.Path, "exists", lambda path: device)
    monkeypatch.setattr(loader.shutil, "which", lambda name: tool)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_about_unused_gpu()
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == warned
    assert all("NVIDIA GPU" in text and "jax[" not in text for text in messages)
