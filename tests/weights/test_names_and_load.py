"""Key map and strict loading: the right values in the right places, nothing left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from models_for_tests import tiny_config, tiny_tensors, write_tiny_llama
from safetensors.numpy import load_file, save_file

from mmtp_jax.families.registry import FAMILIES
from mmtp_jax.families.tensors import Sources
from mmtp_jax.specs import AttentionSpec, DenseSpec, ModelConfig
from mmtp_jax.weights.checkpoint import Checkpoint, open_checkpoint
from mmtp_jax.weights.errors import ModelError
from mmtp_jax.weights.load import ParameterReader

FLOAT32 = np.dtype(np.float32)


def sources(config: ModelConfig) -> Sources:
    return FAMILIES[config.family].sources(config)


def load(
    checkpoint: Checkpoint,
    config: ModelConfig,
    expected: Mapping[str, tuple[int, ...]],
    dtype: np.dtype = FLOAT32,
) -> dict[str, np.ndarray]:
    reader = ParameterReader(checkpoint, config, expected)
    return {path: reader.read(path, dtype) for path in expected}


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Parameter shapes written out from the architecture, independent of the key map."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (config.vocab_size, hidden),
        "norm.scale": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["head.kernel"] = (hidden, config.vocab_size)
    blocks = {f"layers.{index}": layer for index, layer in enumerate(config.layers)}
    for index, layer in enumerate(config.mtp.modules if config.mtp else ()):
        blocks[f"mtp.{index}.layer"] = layer
        for name in ("token_norm", "hidden_norm", "norm"):
            shapes[f"mtp.{index}.{name}.scale"] = (hidden,)
        shapes[f"mtp.{index}.fuse.kernel"] = (2 * hidden, hidden)
    for path, layer in blocks.items():
        attention, mlp = layer.attention, layer.mlp
        assert isinstance(attention, AttentionSpec) and isinstance(mlp, DenseSpec)
        queries = attention.num_heads * attention.head_dim
        keys = attention.num_kv_heads * attention.head_dim
        shapes |= {
            f"{path}.attention_norm.scale": (hidden,),
            f"{path}.attention.q.kernel": (hidden, queries),
            f"{path}.attention.k.kernel": (hidden, keys),
            f"{path}.attention.v.kernel": (hidden, keys),
            f"{path}.attention.o.kernel": (queries, hidden),
            f"{path}.mlp_norm.scale": (hidden,),
            f"{path}.mlp.gate.kernel": (hidden, mlp.size),
            f"{path}.mlp.up.kernel": (hidden, mlp.size),
            f"{path}.mlp.down.kernel": (mlp.size, hidden),
        }
        if attention.qkv_bias:
            shapes[f"{path}.attention.q.bias"] = (queries,)
            shapes[f"{path}.attention.k.bias"] = (keys,)
            shapes[f"{path}.attention.v.bias"] = (keys,)
        if attention.output_bias:
            shapes[f"{path}.attention.o.bias"] = (hidden,)
    return shapes


class Watched:
    """A checkpoint that records which tensors are read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = checkpoint.config
        self.tokenizer_source = checkpoint.tokenizer_source
        self.names = checkpoint.names
        self._checkpoint = checkpoint
        self.read_names: list[str] = []

    def read(self, name: str) -> np.ndarray:
        self.read_names.append(name)
        return self._checkpoint.read(name)


def change_tensors(directory: Path, changes: dict[str, np.ndarray | None]) -> None:
    """Rewrite the weights with some tensors replaced, added or (None) removed."""
    path = directory / "model.safetensors"
    tensors: dict[str, Any] = load_file(path) | changes
    save_file({name: t for name, t in tensors.items() if t is not None}, path)


@pytest.mark.parametrize(
    ("family", "modules", "changes"),
    [
        ("llama", 0, {}),
        ("llama", 0, {"attention_bias": True, "tie_word_embeddings": True}),
        ("qwen2", 0, {}),
        ("mimo", 3, {}),
    ],
)
def test_every_parameter_gets_its_tensor(
    tmp_path: Path, family: Any, modules: int, changes: dict[str, Any]
) -> None:
    write_tiny_llama(tmp_path, family=family, modules=modules, seed=3, **changes)
    checkpoint = open_checkpoint(tmp_path)
    config = checkpoint.config
    expected = expected_shapes(config)
    assert sources(config).keys() == expected.keys()

    parameters = load(checkpoint, config, expected)
    assert {path: array.shape for path, array in parameters.items()} == expected
    stored = tiny_tensors(tiny_config(family, modules=modules, **changes), seed=3)
    used = set()
    for path, source in sources(config).items():
        (name,) = source.names
        tensor = stored[name]
        np.testing.assert_array_equal(
            parameters[path], tensor.T if path.endswith("kernel") else tensor
        )
        used.add(name)
    assert used == set(stored)


def test_names_of_hand_picked_parameters(tmp_path: Path) -> None:
    config = open_checkpoint(write_tiny_llama(tmp_path, family="mimo", modules=2)).config
    names = {path: source.names[0] for path, source in sources(config).items()}
    assert names["layers.1.attention.o.kernel"] == "model.layers.1.self_attn.o_proj.weight"
    assert names["layers.0.mlp_norm.scale"] == "model.layers.0.post_attention_layernorm.weight"
    assert names["mtp.1.fuse.kernel"] == "model.mtp_layers.1.input_proj.weight"
    assert names["mtp.0.norm.scale"] == "model.mtp_layers.0.final_layernorm.weight"
    assert names["mtp.1.layer.attention.k.bias"] == "model.mtp_layers.1.self_attn.k_proj.bias"
    assert names["mtp.1.layer.mlp.down.kernel"] == "model.mtp_layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_modules_beyond_the_configured_ones_are_never_read(tmp_path: Path, kept: int) -> None:
    checkpoint = Watched(open_checkpoint(write_tiny_llama(tmp_path, family="mimo", modules=3)))
    shipped = checkpoint.config.mtp
    assert shipped is not None and shipped.num_modules == 3
    config = replace(checkpoint.config, mtp=shipped.drafting(kept) if kept else None)
    load(checkpoint, config, expected_shapes(config))
    modules = {name.split(".")[2] for name in checkpoint.read_names if "mtp_layers" in name}
    assert modules == {str(index) for index in range(kept)}
    assert len(checkpoint.read_names) == len(set(checkpoint.read_names))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_conversion_rounds_to_nearest(tmp_path: Path, dtype: Any) -> None:
    checkpoint = open_checkpoint(write_tiny_llama(tmp_path))
    expected = expected_shapes(checkpoint.config)
    exact = load(checkpoint, checkpoint.config, expected)
    rounded = load(checkpoint, checkpoint.config, expected, np.dtype(dtype))
    for path, array in rounded.items():
        assert array.dtype == dtype and array.flags.c_contiguous
        np.testing.assert_array_equal(array, exact[path].astype(dtype))


def check_refused(directory: Path, *words: str) -> None:
    checkpoint = open_checkpoint(directory)
    config = checkpoint.config
    with pytest.raises(ModelError) as caught:
        load(checkpoint, config, expected_shapes(config))
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    change_tensors(tmp_path, {"model.layers.1.mlp.up_proj.weight": None})
    check_refused(tmp_path, "lacks", "model.layers.1.mlp.up_proj.weight")


def test_missing_module_is_named(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, family="mimo", modules=2)
    change_tensors(tmp_path, {"model.mtp_layers.1.input_proj.weight": None})
    check_refused(tmp_path, "lacks", "model.mtp_layers.1.input_proj.weight")


def test_wrong_shape_names_both_shapes(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    name = "model.layers.0.self_attn.k_proj.weight"
    change_tensors(tmp_path, {name: np.zeros((32, 16), np.float32)})
    check_refused(tmp_path, name, "(32, 16)", "(16, 32)")


def test_unused_tensor_is_named(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    change_tensors(tmp_path, {"model.layers.0.self_attn.q_norm.weight": np.ones(8, np.float32)})
    check_refused(tmp_path, "does not use", "model.layers.0.self_attn.q_norm.weight")


def test_biases_that_the_config_does_not_announce_are_refused(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    change_tensors(tmp_path, {"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)})
    check_refused(tmp_path, "does not use", "q_proj.bias")


def test_many_problems_are_counted_not_listed(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    config = open_checkpoint(tmp_path).config
    layer_1 = [s.names[0] for p, s in sources(config).items() if p.startswith("layers.1.")]
    change_tensors(tmp_path, dict.fromkeys(layer_1))
    check_refused(tmp_path, "and 4 more")


def test_inverse_frequencies_are_ignored(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    inverse = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(tmp_path, {inverse: np.ones(4, np.float32)})
    checkpoint = Watched(open_checkpoint(tmp_path))
    config = checkpoint.config
    load(checkpoint, config, expected_shapes(config))
    assert inverse not in checkpoint.read_names


def test_a_tied_head_must_repeat_the_embedding(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, tie_word_embeddings=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(tmp_path, {"lm_head.weight": embedding})
    checkpoint = open_checkpoint(tmp_path)
    parameters = load(checkpoint, checkpoint.config, expected_shapes(checkpoint.config))
    assert "head.kernel" not in parameters
    for head in (embedding + np.eye(64, 32, dtype=np.float32), np.ones((63, 32), np.float32)):
        change_tensors(tmp_path, {"lm_head.weight": head})
        check_refused(tmp_path, "lm_head.weight should repeat model.embed_tokens.weight")


def test_an_unknown_parameter_is_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny_llama(tmp_path))
    with pytest.raises(ModelError, match=r"layers\.0\.gate\.kernel"):
        load(checkpoint, checkpoint.config, {"layers.0.gate.kernel": (1, 1)})
