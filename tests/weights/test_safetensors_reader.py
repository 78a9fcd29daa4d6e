"""Hugging Face directories: configurations, shards, and everything that must be refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models_for_tests import DTYPES, tiny_config, tiny_tensors, write_tiny_llama
from safetensors.numpy import load_file, save_file

from mmtp_jax.families.registry import parse_config
from mmtp_jax.specs import AttentionSpec, DenseSpec, LayerSpec, ModelConfig, RopeConfig
from mmtp_jax.weights.checkpoint import open_checkpoint
from mmtp_jax.weights.errors import ModelError

LAYER = LayerSpec(AttentionSpec(4, 2, 8, rope=RopeConfig(dim=8)), DenseSpec(48))


def parsed(family: Any = "llama", **changes: Any) -> ModelConfig:
    return parse_config(tiny_config(family, **changes), {})


def attentions(config: ModelConfig) -> list[AttentionSpec]:
    found = [layer.attention for layer in config.layers]
    assert all(isinstance(attention, AttentionSpec) for attention in found)
    return found  # type: ignore[return-value]


# --- configurations ---


def test_llama() -> None:
    assert parsed() == ModelConfig(
        family="llama",
        vocab_size=64,
        hidden_size=32,
        layers=(LAYER, LAYER),
        max_position=512,
        norm_eps=1e-5,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_biases() -> None:
    def biases(config: ModelConfig) -> list[tuple[bool, bool]]:
        return [(x.qkv_bias, x.output_bias) for x in attentions(config)]

    assert biases(parsed()) == [(False, False)] * 2
    assert biases(parsed(attention_bias=True)) == [(True, True)] * 2
    assert biases(parsed("qwen2")) == [(True, False)] * 2


def test_defaults_of_absent_keys() -> None:
    config = parsed(
        head_dim=None,
        num_key_value_heads=None,
        rms_norm_eps=None,
        rope_theta=None,
        tie_word_embeddings=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    attention = attentions(config)[0]
    assert (attention.head_dim, attention.num_kv_heads) == (8, 4)
    assert attention.rope == RopeConfig(dim=8)
    assert (config.norm_eps, config.tie_embeddings) == (1e-6, False)
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())


LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {
            "rope_theta": None,
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
        },
    ],
)
def test_llama3_scaling_in_either_dialect(keys: dict[str, Any]) -> None:
    assert attentions(parsed(**keys))[0].rope == RopeConfig(
        dim=8, theta=5e5, scaling="llama3", factor=32.0, original_max_position=8192
    )


def test_rope_parameters_without_scaling() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = parsed(rope_theta=None, rope_parameters=rope)
    assert attentions(config)[0].rope == RopeConfig(8, 1e6)


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({"sliding_window": 16}, [None, None, None]),
        (
            {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1},
            [None, 16, 16],
        ),
        (
            {
                "sliding_window": 16,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            [16, None, 16],
        ),
    ],
)
def test_qwen2_windows(keys: dict[str, Any], windows: list[int | None]) -> None:
    config = parsed("qwen2", num_hidden_layers=3, **keys)
    assert [x.window for x in attentions(config)] == windows


def test_mimo_modules() -> None:
    config = parsed("mimo", modules=3)
    assert config.mtp is not None
    assert config.mtp.modules == config.layers[:1] * 3
    assert attentions(config)[0].qkv_bias and not attentions(config)[0].output_bias
    wiring = config.mtp
    assert (wiring.concat, wiring.target_hidden, wiring.feed) == (
        "hidden_first",
        "pre",
        "chain_post",
    )
    assert wiring.norm == "own" and not wiring.own_head and wiring.zero_first_embedding
    assert parsed("mimo", modules=0).mtp is None


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [
        (2, {}, (2,)),
        ([2, 3], {}, (2, 3)),
        (2, {"eos_token_id": [5, 2]}, (5, 2)),
        (None, {"eos_token_id": 7}, (7,)),
        ([2, 64, -1], {"eos_token_id": [1000, 5]}, (5, 2)),  # a vocabulary of 64
    ],
)
def test_eos_tokens_of_both_files(own: Any, generation: dict[str, Any], expected: Any) -> None:
    assert parse_config(tiny_config(eos_token_id=own), generation).eos_token_ids == expected


def test_wrong_ids_name_their_file() -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json sets eos_token_id='2', which"):
        parse_config(tiny_config(), {"eos_token_id": "2"})


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ("llama", {"architectures": None, "model_type": None}, "none given"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5"),
        ("llama", {"sliding_window": 128}, "sliding_window=128"),
        ("llama", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1"),
        ("qwen2", {"attention_bias": False}, "attention_bias=False"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "lacks the key 'factor'"),
        ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "lacks the key 'factor'"),
        (
            "llama",
            {"rope_parameters": {"full_attention": {}}},
            "rope_parameters .* full_attention=",
        ),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"hidden_size": None}, "lacks the key 'hidden_size'"),
        ("llama", {"num_attention_heads": 3}, r"num_heads \(3\)"),
        ("llama", {"num_attention_heads": 0, "head_dim": None}, r"heads \(0\) must"),
        ("llama", {"num_hidden_layers": 0}, "at least one layer"),
        ("llama", {"hidden_size": "big"}, "hidden_size='big', which is not an integer"),
        ("llama", {"vocab_size": 64.0}, r"vocab_size=64\.0, which is not an integer"),
        ("llama", {"num_key_value_heads": True}, "num_key_value_heads=True"),
        ("llama", {"num_key_value_heads": 0}, "num_kv_heads must be >= 1, got 0"),
        ("llama", {"head_dim": 0}, "must be .* > 0, got 0"),
        ("llama", {"rope_theta": 0}, "theta must be > 0, got 0"),
        ("llama", {"rope_theta": float("inf")}, "theta must be a finite number"),
        ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5', which is not a number"),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings='no'.* true or false"),
        ("llama", {"architectures": "LlamaForCausalLM"}, "architectures=.* not a list"),
        ("llama", {"architectures": [1]}, "architecture 1 is not supported"),
        ("llama", {"rope_scaling": "llama3"}, "rope_scaling='llama3', which is not an object"),
        ("llama", {"rope_scaling": LLAMA3 | {"factor": "8"}}, "factor='8', which is not a number"),
        ("llama", {"rope_scaling": LLAMA3 | {"low_freq_factor": 4}}, "low_freq_factor"),
        ("llama", {"eos_token_id": "2"}, "sets eos_token_id='2', which is neither a token id"),
        ("llama", {"eos_token_id": [2.0]}, "eos_token_id"),
        ("mimo", {"num_hidden_layers": -1}, r"num_hidden_layers must lie in \[0, 10000\], got -1"),
        ("mimo", {"num_nextn_predict_layers": -1}, r"predict_layers must lie in .* got -1"),
        ("mimo", {"num_nextn_predict_layers": 10**9}, r"predict_layers must lie in"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window needs sliding_window"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4}, "and max_window_layers"),
        ("qwen2", {"attention_bias": 1}, "attention_bias=1, which is not implemented"),
        (
            "llama",
            {"rope_scaling": LLAMA3 | {"type": "linear"}},
            "rope_scaling of config.json sets type='linear'",
        ),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["chunked", "x"]},
            "layer_types",
        ),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "no sliding_window"),
    ],
)
def test_what_is_not_implemented_is_named(family: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        parsed(family, **changes)
    assert "\n" not in str(caught.value)


def test_the_model_type_names_a_family_without_architectures() -> None:
    assert parsed(architectures=None) == parsed()


def test_linear_and_yarn_scaling() -> None:
    linear = parsed(rope_scaling={"type": "linear", "factor": 4})
    assert attentions(linear)[0].rope == RopeConfig(8, scaling="linear", factor=4.0)
    yarn = parsed(rope_scaling={"rope_type": "yarn", "factor": 2.0, "beta_fast": 16})
    assert attentions(yarn)[0].rope == RopeConfig(
        8,
        scaling="yarn",
        factor=2.0,
        original_max_position=512,
        beta_fast=16.0,
        attention_factor=1 + 0.1 * math.log(2),
    )


def test_bookkeeping_keys_are_ignored() -> None:
    assert parsed(transformers_version="5.0", attention_dropout=0.1, pretraining_tp=1) == parsed()


# --- files ---


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_as_stored(tmp_path: Path, dtype: Any, shards: int) -> None:
    checkpoint = open_checkpoint(write_tiny_llama(tmp_path, dtype=dtype, shards=shards, seed=5))
    stored = tiny_tensors(tiny_config(), seed=5)
    assert checkpoint.names() == {name: tensor.shape for name, tensor in stored.items()}
    for name, tensor in stored.items():
        assert checkpoint.read(name).dtype == DTYPES[dtype]
        np.testing.assert_array_equal(checkpoint.read(name), tensor.astype(DTYPES[dtype]))


def test_modules_in_a_file_outside_the_index_are_found(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, family="mimo", modules=1, shards=2)
    index_path = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    moved = {}
    for shard in tmp_path.glob("*.safetensors"):
        tensors = load_file(shard)
        moved |= {name: t for name, t in tensors.items() if "mtp_layers" in name}
        save_file({name: t for name, t in tensors.items() if "mtp_layers" not in name}, shard)
    save_file(moved, tmp_path / "model_mtp.safetensors")
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if k not in moved}
    index_path.write_text(json.dumps(index))
    names = open_checkpoint(tmp_path).names()
    assert moved and set(moved) < set(names)


def test_the_index_decides_between_two_files(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, shards=2)
    stale = {"model.norm.weight": np.zeros(32, np.float32)}
    save_file(stale, tmp_path / "stale.safetensors")
    assert open_checkpoint(tmp_path).read("model.norm.weight").any()
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"repeats the tensor model\.norm\.weight"):
        open_checkpoint(tmp_path).names()


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="lacks model-00002-of-00002"):
        open_checkpoint(tmp_path).names()


def test_a_directory_with_a_configuration_only(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    checkpoint = open_checkpoint(tmp_path, with_weights=False)
    assert checkpoint.config.vocab_size == 64
    for open_it in (checkpoint.names, lambda: open_checkpoint(tmp_path)):
        with pytest.raises(ModelError, match=r"no \*\.safetensors"):
            open_it()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("whole"))


@given(kept=st.floats(0.0, 0.9999))
def test_every_truncation_is_found(whole: Path, kept: float) -> None:
    directory = whole / "cut"
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_bytes((whole / "config.json").read_bytes())
    content = (whole / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(content[: int(kept * len(content))])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated"):
        open_checkpoint(directory).names()


def test_other_dtypes_are_refused(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    quantized = {"model.norm.weight": np.zeros(32, ml_dtypes.float8_e4m3fn)}
    save_file(quantized, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight as F8_E4M3"):
        open_checkpoint(tmp_path).names()


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, r"has no config\.json"),
        ("config.json", "{", "not readable JSON"),
        ("config.json", "[]", "not hold a JSON object"),
        ("generation_config.json", "nonsense", "not readable JSON"),
        ("config.json", "[" * 100_000, "not readable JSON"),
        ("model.safetensors.index.json", "{}", "no weight_map"),
        ("model.safetensors.index.json", '{"weight_map": {"a": ["b"]}}', "places a in"),
    ],
)
def test_damaged_json_is_named(tmp_path: Path, file: str, content: str | None, words: str) -> None:
    write_tiny_llama(tmp_path)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(content)
    with pytest.raises(ModelError, match=words) as caught:
        open_checkpoint(tmp_path).names()
    assert file in str(caught.value)


def test_a_path_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no model at"):
        open_checkpoint(tmp_path / "absent")
