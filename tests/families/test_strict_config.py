"""Every key of config.json has to be understood and of its type."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from families.goldens import GOLDENS, ROOT, golden_config
from hypothesis import given, settings
from hypothesis import strategies as st

from mmtp_jax.checks import ConfigError
from mmtp_jax.families.registry import parse_config
from mmtp_jax.families.settings import _BOOKKEEPING
from mmtp_jax.specs import ModelConfig
from mmtp_jax.weights.errors import ModelError

type Path = tuple[str, ...]

# Keys of a family that say nothing new, whatever they hold.
REDUNDANT = {
    ("attention_chunk_size",),
    ("hybrid_block_size",),
    ("max_seq_len",),
    ("projector_bias",),
    ("text_config", "architectures"),
    ("text_config", "max_seq_len"),
    ("text_config", "number_of_conv_states"),
    ("text_config", "rms_norm_eps_moe_gate"),
    ("audio_bos_token_id",),
    ("audio_config",),
    ("audio_token_id",),
    ("image_bos_token_id",),
    ("image_token_id",),
    ("vision_config",),
}
# The same for DeepSeek-V3, whose heads share one key.
OF_OTHER_ATTENTION = ("num_key_value_heads", "head_dim", "qk_head_dim")
SOURCES = [
    (name, file)
    for name in GOLDENS
    for file in ("config.json", "config_hf.json")
    if (ROOT / name / file).exists()
]


def source(name: str, file: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((ROOT / name / file).read_text())
    return config


def paths(config: dict[str, Any], above: Path = ()) -> Iterator[Path]:
    """All keys, those of nested objects too."""
    for key, value in config.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from paths(value, (*above, key))


def changed(config: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    part = config
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return config


def at(config: Any, path: Path) -> Any:
    for key in path:
        config = config[key]
    return config


def parsed(config: dict[str, Any]) -> ModelConfig:
    return parse_config(config, {})


def refusal(config: dict[str, Any]) -> str:
    """The sentence with which a config is refused."""
    with pytest.raises(ModelError) as caught:
        parsed(config)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    return message


def wrong_type(value: Any) -> Any:
    """JSON of another type than `value`."""
    if isinstance(value, bool):
        return "yes"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str):
        return 3
    return {"unknown": 1} if value is None else 3.5


@pytest.mark.parametrize(("name", "file"), SOURCES)
def test_every_key_has_a_type(name: str, file: str) -> None:
    config = source(name, file)
    checked = 0
    for path in paths(config):
        if set(path) & (_BOOKKEEPING - {"architectures"}):
            continue
        if any(path[: len(given)] == given for given in REDUNDANT):
            continue
        if name == "deepseek_v3" and path[0] in OF_OTHER_ATTENTION:
            continue
        if name == "step3p5" and path == ("rope_theta",):  # a number is every layer's
            continue
        wrong = changed(config, path, wrong_type(at(config, path)))
        assert path[-1] in refusal(wrong), path
        checked += 1
    assert checked > 12


@pytest.mark.parametrize(("name", "file"), SOURCES)
def test_unknown_keys_are_named(name: str, file: str) -> None:
    config = source(name, file)
    objects = [path for path in paths(config) if isinstance(at(config, path), dict)]
    for path in [(), *objects]:
        if {"audio_config", "vision_config", "auto_map"} & set(path):
            continue
        message = refusal(changed(config, (*path, "attention_temperature"), 2.0))
        assert "attention_temperature=2.0, which is not implemented" in message
        assert all(key in message for key in path)


@pytest.mark.parametrize("name", GOLDENS)
@pytest.mark.parametrize(
    "key", ["rope_scaling", "mtp_config", "attention_other_setting", "text_config"]
)
def test_objects_that_a_family_does_not_have_are_refused(name: str, key: str) -> None:
    config = golden_config(name)
    if key not in config or config[key] is None:
        assert key in refusal(config | {key: {"unknown": 1}})


@pytest.mark.parametrize("name", GOLDENS)
def test_keys_that_are_needed_are_named(name: str) -> None:
    """Without a key the model is refused or is read with a default; what may have one is listed."""
    defaults = {
        "model_type",
        "architectures",  # the model_type says it
        "attention_bias",
        "attention_other_setting",
        "attention_projection_layout",
        "attention_value_scale",
        "add_full_attention_sink_bias",
        "add_swa_attention_sink_bias",
        "att_impl_type",
        "bos_token_id",
        "eos_token_id",
        "head_dim",
        "hidden_act",
        "is_llama_config",
        "layernorm_epsilon",
        "max_seq_len",
        "max_window_layers",
        "mlp_bias",
        "moe_every_n_layer",
        "moe_layer_offset",
        "moe_router_activation",
        "moe_router_scaling_factor",
        "mtp_config",
        "n_shared_experts",
        "need_fp32_gate",
        "norm_expert_weight",
        "norm_topk_prob",
        "num_key_value_heads",
        "num_nextn_predict_layers",
        "partial_rotary_factor",
        "partial_rotary_factors",
        "q_lora_rank",
        "rms_norm_eps",
        "rope_interleaved",
        "rope_scaling",
        "rope_theta",
        "routed_scaling_factor",
        "scoring_func",
        "sink",
        "sliding_window",
        "sliding_window_size",
        "swa_head_dim",
        "swa_num_attention_heads",
        "swa_num_key_value_heads",
        "swa_v_head_dim",
        "swiglu_limits",
        "swiglu_limits_shared",
        "tie_word_embeddings",
        "topk_method",
        "use_head_wise_attn_gate",
        "use_moe",
        "use_moe_router_bias",
        "use_qk_norm",
        "use_rope_layers",
        "use_sliding_window",
        "v_head_dim",
        "yarn_only_types",
        "zero_centered",
    }
    config = golden_config(name)
    if name == "deepseek_v3":
        defaults.add("moe_layer_freq")
    else:
        defaults |= {"n_group", "topk_group"}
    for key in config:
        if key in _BOOKKEEPING | defaults or (key,) in REDUNDANT:
            continue
        assert key in refusal({k: v for k, v in config.items() if k != key})


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama_tied", {"rope_interleaved": True}, "rope_interleaved=True"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers=2"),
        ("qwen2", {"attention_bias": False}, "attention_bias=False"),
        ("qwen2", {"use_mrope": True}, "use_mrope=True"),
        ("qwen3", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1"),
        ("qwen3", {"num_experts": 8}, "num_experts=8"),
        ("mimo", {"use_mrope": True}, "use_mrope=True"),
        ("mimo", {"mtp_feed": "chain"}, "feed must be one of"),
        ("mimo", {"mtp_fed": "target"}, "mtp_fed='target'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek_v3", {"n_group": 5}, "num_groups (5)"),
        ("deepseek_v3", {"num_experts_per_tok": 7}, "top_k (7)"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace must lie in"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("glm4_moe", {"partial_rotary_factor": 0.2}, "rope dim must be even"),
        ("glm4_moe", {"partial_rotary_factor": 1.5}, "rope dim must be <= head_dim"),
        ("glm4_moe", {"num_attention_heads": 5}, "num_heads (5)"),
        ("mimo_v2_flash", {"attention_projection_layout": "fused_qkv"}, "'fused_qkv'"),
        ("mimo_v2_flash", {"hybrid_layer_pattern": [0, 1, 2, 0]}, "must hold 0 or 1"),
        ("mimo_v2_flash", {"hybrid_layer_pattern": [0, 1, 1]}, "must have 4 entries, got 3"),
        ("mimo_v2_flash", {"moe_layer_freq": [0, 1, 1, 1, 1]}, "must have 4 entries, got 5"),
        (
            "mimo_v2_flash",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope type 'linear' is not implemented",
        ),
        ("step3p5", {"zero_centered": False}, "zero_centered=False"),
        ("step3p5", {"sink": True}, "sink=True"),
        ("step3p5", {"moe_router_activation": "softmax"}, "moe_router_activation='softmax'"),
        ("step3p5", {"use_rope_layers": [True]}, "use_rope_layers=[True]"),
        ("step3p5", {"moe_layers_enum": "2,3,x"}, "moe_layers_enum must be layers like"),
        ("step3p5", {"moe_layers_enum": "2,8"}, "moe_layers_enum must lie in [0, 8), got 8"),
        ("step3p5", {"yarn_only_types": []}, "yarn_only_types=[]"),
        ("step3p5", {"layer_types": ["full_attention"] * 4}, "layer_types must have 5 entries"),
        ("step3p5", {"rope_theta": [1e4] * 4 + ["x"] * 4}, "rope_theta holds 'x'"),
        ("step3p5", {"swiglu_limits": [-1.0] * 8}, "limit must be > 0"),
        (
            "step3p5",
            {"rope_scaling": {"rope_type": "default", "rope_theta": 2.0}},
            "rope_scaling of config.json sets rope_theta=2.0",
        ),
    ],
)
def test_what_is_not_implemented_is_named(name: str, changes: dict[str, Any], words: str) -> None:
    assert words in refusal(golden_config(name) | changes)


@pytest.mark.parametrize(
    ("part", "changes", "words"),
    [
        ("text_config", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("text_config", {"q_bias": True}, "q_bias=True"),
        ("text_config", {"gate_activation": "softmax"}, "gate_activation='softmax'"),
        ("text_config", {"norm_after_topk": False}, "norm_after_topk=False"),
        ("text_config", {"shared_expert_sink": False}, "shared_expert_sink=False"),
        ("text_config", {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ("text_config", {"local_layer_ids": [0, 6]}, "local_layer_ids must lie in [0, 6), got 6"),
        ("text_config", {"layer_types": ["hybrid"] * 5}, "layer_types must name"),
        ("text_config", {"sconv_kernel_size": 1}, "conv_taps must be 0 or >= 2"),
        ("text_config", {"unpadded_vocab_size": 97}, "padded_vocab_size (96) must be >="),
        ("text_config", {"swa_head_dim": 0}, "swa_head_dim must be >= 1"),
        ("text_config", {"model_max_length": None}, "neither model_max_length nor"),
        ("mtp_config", {"local_layer_ids": [4]}, "must lie in [0, 4), got 4"),
        ("mtp_config", {"num_nextn_predict_layers": -1}, "must lie in [0, 10000], got -1"),
        ("mtp_config", {"local_extent": 0}, "extent must be >= 1"),
        ("mtp_config", {"num_layers": 4}, "mtp_config of config.json sets num_layers=4"),
    ],
)
def test_what_inkling_does_not_implement(part: str, changes: dict[str, Any], words: str) -> None:
    config = golden_config("inkling")
    assert words in refusal(config | {part: config[part] | changes})


# --- any JSON at all ---

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
TOKENS = ("bos_token_id", "eos_token_id", "temperature")
numbers = st.sampled_from([0, -1, 1, 2, 3, 5, 0.0, 0.5, 1e300, 2**40, 10**400])


@settings(max_examples=150)
@given(data=st.data(), place=st.sampled_from(SOURCES))
def test_any_json_is_read_or_refused(data: st.DataObject, place: tuple[str, str]) -> None:
    config = source(*place)
    known = sorted(paths(config))
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(known))
        other = data.draw(st.sampled_from(known))
        value = data.draw(json_values | numbers | st.just(at(source(*place), other)))
        try:
            config = changed(config, path, value)
        except (KeyError, TypeError, IndexError):  # an earlier change took the object away
            continue
    generation = data.draw(st.fixed_dictionaries({}, optional=dict.fromkeys(TOKENS, json_values)))
    try:
        assert isinstance(parse_config(config, generation), ModelConfig)
    except (ModelError, ConfigError) as error:
        assert str(error)
