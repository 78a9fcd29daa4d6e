"""Variants of the golden checkpoints that must be read as the same model, or one less."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from mmtp_jax.families.registry import parse_config
from mmtp_jax.models.model import model_graph
from mmtp_jax.models.parts import RMSNorm
from mmtp_jax.specs import AttentionSpec
from mmtp_jax.weights.checkpoint import Checkpoint, open_checkpoint
from mmtp_jax.weights.load import problems

GOLDENS = Path(__file__).parent / "goldens"


def config_of(name: str, file: str = "config.json") -> dict[str, Any]:
    config: dict[str, Any] = json.loads((GOLDENS / name / file).read_text())
    return config


def write(
    directory: Path, name: str, config: dict[str, Any], extra: tuple[str, ...] = ()
) -> Checkpoint:
    """The tensors of a golden, and `extra` ones of one number, under another config.json."""
    for path in (GOLDENS / name).glob("*.safetensors"):
        shutil.copy(path, directory)
    if extra:
        save_file(dict.fromkeys(extra, np.ones(1, np.float32)), directory / "extra.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return open_checkpoint(directory)


def problems_of(checkpoint: Checkpoint) -> list[tuple[str, list[str]]]:
    config = checkpoint.config
    return list(problems(checkpoint, config, model_graph(config).shapes()))


STEP_3_7 = {
    "architectures": ["Step3p7ForConditionalGeneration"],
    "model_type": "step3p7",
    "image_token_id": 90,
    "image_token_len": 169,
    "patch_token_len": 81,
    "understand_projector_stride": 2,
    "projector_bias": False,
    "vision_config": {"model_type": "perception_encoder", "width": 8, "layers": 1, "heads": 1},
}


@pytest.mark.parametrize("dialect", ["release", "transformers"])
def test_step_3_7_is_step_3_5_beside_a_tower(tmp_path: Path, dialect: str) -> None:
    released = config_of("step3p5")
    config: dict[str, Any] = STEP_3_7 | {"text_config": released}
    if dialect == "transformers":
        config = config_of("step3p5", "config_hf.json")
    tower = ("vision_model.conv1.weight", "vit_large_projector.weight")
    checkpoint = write(tmp_path, "step3p5", config, tower)
    assert checkpoint.config == parse_config(released, {})
    assert problems_of(checkpoint) == []
    (_, unknown), *rest = problems_of(write(tmp_path, "step3p5", config, ("audio.weight",)))
    assert unknown == ["audio.weight"] and not rest


def test_options_of_step_3_7_stand_outside_the_text_config() -> None:
    config = STEP_3_7 | {"text_config": config_of("step3p5"), "mtp_feed": "chain_post"}
    model = parse_config(config | {"eos_token_id": 7}, {})
    assert model.mtp is not None and model.mtp.feed == "chain_post"
    assert model.eos_token_ids == (7,)


def test_step_with_one_theta_and_no_window() -> None:
    config = config_of("step3p5") | {"num_nextn_predict_layers": 0, "rope_theta": 300.0}
    config |= {"layer_types": ["full_attention"] * 5, "sliding_window": None}
    for layer in parse_config(config, {}).layers:
        assert isinstance(layer.attention, AttentionSpec) and layer.attention.rope is not None
        assert layer.attention.window is None and layer.attention.rope.theta == 300.0


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "inkling", "step3p5"])
def test_transformers_saves_the_number_of_modules_without_them(tmp_path: Path, name: str) -> None:
    saved = config_of(name, "config_hf.json")
    whole = write(tmp_path, name, saved).config
    assert whole.mtp is not None
    count = len(whole.layers)
    modules = ("model.mtp.", *(f"model.layers.{count + m}." for m in range(whole.num_modules)))
    for path in tmp_path.glob("*.safetensors"):
        kept = {name: t for name, t in load_file(path).items() if not name.startswith(modules)}
        save_file(kept, path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == replace(whole, mtp=None)
    assert problems_of(checkpoint) == []


def test_mimo_v2_flash_rotates_a_third_where_transformers_does() -> None:
    saved = config_of("mimo_v2_flash", "config_hf.json")
    for kind in saved["rope_parameters"].values():
        kind["partial_rotary_factor"] = 0.334
    expected = parse_config(saved, {})
    for kind in saved["rope_parameters"].values():
        del kind["partial_rotary_factor"]
    assert parse_config(saved, {}) == expected


def test_zero_centred_norms_round_once() -> None:
    """As transformers does: in bfloat16, 1 + scale would lose most of a small scale."""
    config = parse_config(config_of("step3p5"), {})
    norm = RMSNorm(4096, config)
    scale = jnp.asarray(0.05 * np.random.default_rng(0).standard_normal(4096), jnp.bfloat16)
    norm.scale = nnx.Param(scale)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 4096)), jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    want = wide / np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + config.norm_eps)
    want *= 1 + np.asarray(scale, np.float64)
    np.testing.assert_allclose(np.asarray(norm(x), np.float64), want, rtol=2**-8)
