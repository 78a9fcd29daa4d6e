"""`hf_overrides`: keys of config.json replaced when a model is loaded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from families.goldens import ROOT, golden, golden_config
from hypothesis import given
from hypothesis import strategies as st

from mmtp_jax import llm
from mmtp_jax.config import ConfigError, EngineConfig, engine_config
from mmtp_jax.families.settings import overridden
from mmtp_jax.loader import load_model
from mmtp_jax.specs import AttentionSpec, ModelConfig, MTPConfig, RopeConfig
from mmtp_jax.weights.checkpoint import open_checkpoint
from mmtp_jax.weights.errors import ModelError


def opened(name: str, **overrides: Any) -> ModelConfig:
    return open_checkpoint(ROOT / name, overrides).config


def modules(config: ModelConfig) -> MTPConfig:
    assert config.mtp is not None
    return config.mtp


def rope(config: ModelConfig) -> RopeConfig:
    attention = config.layers[0].attention
    assert isinstance(attention, AttentionSpec) and attention.rope is not None
    return attention.rope


json_objects = st.recursive(
    st.none() | st.integers(0, 3) | st.text("ab", max_size=1),
    lambda inner: st.dictionaries(st.text("abc", max_size=1), inner, max_size=3),
    max_leaves=8,
)
tables = st.dictionaries(st.text("abc", max_size=1), json_objects, max_size=3)


@given(tables, tables)
def test_objects_are_merged_key_by_key(values: dict[str, Any], overrides: dict[str, Any]) -> None:
    before = copy.deepcopy((values, overrides))
    merged = overridden(values, overrides)
    assert (values, overrides) == before
    assert merged.keys() == values.keys() | overrides.keys()
    for key in merged:
        if key not in overrides:
            assert merged[key] == values[key]
        elif isinstance(values.get(key), dict) and isinstance(overrides[key], dict):
            assert merged[key] == overridden(values[key], overrides[key])
        else:
            assert merged[key] == overrides[key]
    assert overridden(values, {}) == values


def test_nested_keys() -> None:
    assert rope(opened("llama")).factor == 8.0
    changed = rope(opened("llama", rope_scaling={"factor": 4.0}))
    assert (changed.factor, changed.scaling, changed.original_max_position) == (4.0, "llama3", 64)
    inkling = opened("inkling", text_config={"log_scaling_n_floor": 32}, mtp_config={})
    full = inkling.layers[5].attention
    assert isinstance(full, AttentionSpec) and full.log_scaling is not None
    assert (full.log_scaling.floor, full.log_scaling.alpha) == (32, 0.3)
    assert modules(inkling).num_modules == 4


def test_null_removes_a_key() -> None:
    assert rope(opened("llama", rope_scaling=None)) == RopeConfig(16, 5e5)
    assert opened("inkling", mtp_config=None).mtp is None
    assert opened("mimo", num_nextn_predict_layers=None).mtp is None
    full = opened("inkling", text_config={"log_scaling_n_floor": None}).layers[5].attention
    assert isinstance(full, AttentionSpec) and full.log_scaling is None
    with pytest.raises(ModelError, match="lacks the key 'hidden_size'"):
        opened("llama", hidden_size=None)


@pytest.mark.parametrize("name", ["mimo", "inkling", "mimo_v2_flash", "step3p5", "deepseek_v3"])
@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("target_hidden", ("pre", "post")),
        ("feed", ("chain_pre", "chain_post", "target")),
        ("concat", ("hidden_first", "embed_first")),
        ("zero_first_embedding", (False, True)),
        ("embed_norm", (False, True)),
        ("consumed_position", (False, True)),
    ],
)
def test_wiring_options(name: str, option: str, values: tuple[Any, ...]) -> None:
    """Each value reaches the modules, and nothing else changes."""
    found = {value: opened(name, **{f"mtp_{option}": value}) for value in values}
    for value, config in found.items():
        assert getattr(modules(config), option) == value
    plain = getattr(modules(golden(name).config), option)
    assert found[plain] == golden(name).config
    assert len(set(found.values())) == len(values)


def test_modules_of_inkling_without_their_window() -> None:
    windows = [layer.attention.window for layer in modules(golden("inkling").config).modules]
    assert windows == [6, None, 6, 6]
    changed = opened("inkling", mtp_windowed=False)
    assert [layer.attention.window for layer in modules(changed).modules] == [None] * 4
    assert changed.layers == golden("inkling").config.layers


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("mimo", {"mtp_fed": "target"}, "config.json sets mtp_fed='target', which is not impl"),
        ("mimo", {"mtp_feed": "chain"}, "feed must be one of .* got 'chain'"),
        ("mimo", {"mtp_feed": 3}, "mtp_feed=3, which is not a string"),
        ("mimo", {"mtp_embed_norm": "yes"}, "mtp_embed_norm='yes', which is not true or false"),
        ("llama", {"mtp_feed": "target"}, "mtp_feed='target', which is not implemented"),
        ("llama", {"rope_scaling": {"alpha": 2}}, "rope_scaling of config.json sets alpha=2"),
        ("mimo", {"mtp_windowed": True}, "mtp_windowed=True, which is not implemented"),
        ("inkling", {"text_config": {"mtp_feed": "target"}}, "text_config .* mtp_feed='target'"),
    ],
)
def test_unknown_options_are_refused(name: str, overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        opened(name, **overrides)


def test_a_loaded_model_has_them() -> None:
    overrides = {"mtp_feed": "target", "mtp_config": {"chain_hidden_post_norm": False}}
    config = engine_config(
        str(ROOT / "inkling"),
        {"num_speculative_tokens": 2},
        hf_overrides=overrides,
        num_pages=64,
        page_size=4,
    )
    mtp = modules(load_model(config).graph.config)
    assert (mtp.feed, mtp.num_modules, mtp.norm) == ("target", 2, "none")
    assert golden_config("inkling")["mtp_config"]["num_nextn_predict_layers"] == 4


def test_the_llm_passes_them_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[EngineConfig] = []

    def stop(config: EngineConfig) -> None:
        seen.append(config)
        raise ModelError("enough")

    monkeypatch.setattr(llm, "load_model", stop)
    with pytest.raises(ModelError, match="enough"):
        llm.LLM("any", hf_overrides={"mtp_feed": "target"})
    assert [config.hf_overrides for config in seen] == [{"mtp_feed": "target"}]
    with pytest.raises(ConfigError, match="hf_overrides must be"):
        llm.LLM("any", hf_overrides="mtp_feed")
