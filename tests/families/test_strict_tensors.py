"""Checkpoints with something missing, superfluous or damaged are refused with one sentence."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from families.goldens import GOLDENS, ROOT, Edited, copied, golden, read_all, reader, tensors_of
from safetensors.numpy import load_file, save_file

from mmtp_jax.weights.checkpoint import Checkpoint, open_checkpoint
from mmtp_jax.weights.errors import ModelError

WITH_MODULES = [name for name in GOLDENS if golden(name).config.mtp is not None]
COPY = re.compile(r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight")
TOWER = re.compile(r"model\.(visual|audio)\..*")
# What makes a tensor one of module k: "model.mtp.layers.3.", or a layer after the last.
MODULE = re.compile(r"(model\.mtp\.layers\.|model\.mtp_layers\.|model\.layers\.)(\d+)(\..*)")


def refusal(checkpoint: Checkpoint) -> str:
    """The sentence with which a checkpoint is refused when its parameters are asked for."""
    with pytest.raises(ModelError) as caught:
        reader(checkpoint)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    return message


def first_module(name: str) -> int:
    """The number in the tensor names of the first module."""
    config = golden(name).config
    return len(config.layers) if config.family in ("deepseek_v3", "glm4_moe", "step3p5") else 0


def module_of(name: str, tensor: str) -> int | None:
    """Which module of a golden a tensor belongs to."""
    match = MODULE.fullmatch(tensor)
    if match is None:
        return None
    prefix, number, _ = match.groups()
    first = first_module(name)
    if (prefix == "model.layers.") != bool(first) or int(number) < first:
        return None
    return int(number) - first


@pytest.mark.parametrize("name", GOLDENS)
def test_goldens_load_whole(name: str) -> None:
    checkpoint = Edited(golden(name))
    values = read_all(checkpoint)
    assert all(np.isfinite(value).all() for value in values.values())
    unread = golden(name).names().keys() - set(checkpoint.read_names)
    assert all(TOWER.fullmatch(tensor) for tensor in unread)
    assert bool(unread) == name.startswith("inkling")


@pytest.mark.parametrize("name", GOLDENS)
def test_every_tensor_is_needed_in_its_shape(name: str) -> None:
    """Trunk, modules and experts: without it, one too large, or with one dimension more. Of all
    tensors whose names differ in numbers alone, the last stands for the others."""
    kinds = {re.sub(r"\d+", "0", tensor): tensor for tensor in golden(name).names()}
    for tensor in kinds.values():
        shape = golden(name).names()[tensor]
        if TOWER.fullmatch(tensor):
            continue
        longer = np.zeros((shape[0] + 1, *shape[1:]), np.float32)
        deeper = np.zeros((1, *shape), np.float32)
        if COPY.fullmatch(tensor):
            read_all(Edited(golden(name), {tensor: None}))
            for wrong in (longer, np.zeros(shape, np.float32)):
                message = refusal(Edited(golden(name), {tensor: wrong}))
                assert f"{tensor} should repeat " in message
            continue
        message = refusal(Edited(golden(name), {tensor: None}))
        assert message == f"the checkpoint lacks the tensors {tensor}"
        for wrong in (longer, deeper):
            message = refusal(Edited(golden(name), {tensor: wrong}))
            assert f"{tensor} is {wrong.shape} but must be {shape}" in message


@pytest.mark.parametrize("name", WITH_MODULES)
def test_a_module_that_is_not_declared_is_refused(name: str) -> None:
    config = golden(name).config
    last = first_module(name) + config.num_modules - 1
    extra = {}
    for tensor in golden(name).names():
        match = MODULE.fullmatch(tensor)
        if match is not None and module_of(name, tensor) == config.num_modules - 1:
            prefix, number, rest = match.groups()
            assert int(number) == last
            extra[f"{prefix}{last + 1}{rest}"] = golden(name).read(tensor)
    message = refusal(Edited(golden(name), extra))
    assert "has tensors that this model does not use:" in message
    assert any(f"{tensor}" in message for tensor in extra)
    assert f"and {len(extra) - 5} more" in message


@pytest.mark.parametrize("name", WITH_MODULES)
def test_a_module_that_is_declared_is_needed(name: str) -> None:
    count = golden(name).config.num_modules
    for module in range(count):
        without = {
            tensor: None for tensor in golden(name).names() if module_of(name, tensor) == module
        }
        assert len(without) > 5
        message = refusal(Edited(golden(name), without))
        assert "the checkpoint lacks the tensors" in message
        assert any(tensor in message for tensor in without)


@pytest.mark.parametrize("name", GOLDENS)
@pytest.mark.parametrize(
    "tensor",
    [
        "model.layers.0.self_attn.rotary_emb.cos_cached",
        "model.norm.bias",
        "visual.blocks.0.weight",
        "mtp.norm.weight",
        "layers.0.weight",
    ],
)
def test_an_unknown_tensor_is_refused(name: str, tensor: str) -> None:
    message = refusal(Edited(golden(name), {tensor: np.zeros(4, np.float32)}))
    assert message == f"the checkpoint has tensors that this model does not use: {tensor}"


@pytest.mark.parametrize("name", ["inkling", "inkling_chain_norm"])
def test_the_shared_norm_goes_with_its_key(name: str) -> None:
    norm = "model.mtp.chain_norm.weight"
    if name == "inkling":
        message = refusal(Edited(golden(name), {norm: np.ones(24, np.float32)}))
        assert f"does not use: {norm}" in message
    else:
        assert f"lacks the tensors {norm}" in refusal(Edited(golden(name), {norm: None}))


@pytest.mark.parametrize("name", ["inkling", "inkling_chain_norm"])
def test_towers_may_hold_anything(name: str) -> None:
    checkpoint = Edited(golden(name), {"model.visual.new.weight": np.zeros(3, np.float32)})
    read_all(checkpoint)
    assert not any(TOWER.fullmatch(tensor) for tensor in checkpoint.read_names)


# --- files ---


@pytest.mark.parametrize("name", GOLDENS)
def test_a_truncated_file_is_named(name: str, tmp_path: Path) -> None:
    for path in (ROOT / name).glob("*.safetensors"):
        content = path.read_bytes()
        for kept in (0, 7, 100, len(content) // 2, len(content) - 1):
            copied(name, tmp_path)
            (tmp_path / path.name).write_bytes(content[:kept])
            with pytest.raises(ModelError, match=f"{path.name} is truncated or not a safetensors"):
                open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", GOLDENS)
def test_a_missing_file_is_noticed(name: str, tmp_path: Path) -> None:
    index_path = ROOT / name / "model.safetensors.index.json"
    index = json.loads(index_path.read_text()) if index_path.exists() else {"weight_map": {}}
    indexed = set(index["weight_map"].values())
    for path in (ROOT / name).glob("*.safetensors"):
        copied(name, tmp_path)
        (tmp_path / path.name).unlink()
        if path.name in indexed:
            with pytest.raises(ModelError, match=f"lacks {path.name}, named by its index"):
                open_checkpoint(tmp_path)
        elif not indexed:
            with pytest.raises(ModelError, match=r"has no \*\.safetensors file"):
                open_checkpoint(tmp_path)
        elif name == "mimo_v2_flash":
            # Only this file's tensors say that there are modules.
            assert open_checkpoint(tmp_path).config == replace(golden(name).config, mtp=None)
        else:
            message = refusal(open_checkpoint(tmp_path))
            assert "lacks the tensors model.mtp." in message


def test_a_partial_module_of_mimo_v2_flash_is_completed(tmp_path: Path) -> None:
    """Its modules are counted by their tensors, so one tensor makes a module."""
    copied("mimo_v2_flash", tmp_path)
    path = tmp_path / "model_mtp.safetensors"
    tensors = load_file(path)
    name = "model.mtp.layers.3.enorm.weight"
    save_file(tensors | {name: tensors["model.mtp.layers.2.enorm.weight"]}, path)
    message = refusal(open_checkpoint(tmp_path))
    assert "lacks the tensors model.mtp.layers.3." in message and name not in message


@pytest.mark.parametrize("name", ["inkling", "inkling_chain_norm", "mimo_v2_flash"])
def test_modules_that_no_index_names_are_found(name: str) -> None:
    index = json.loads((ROOT / name / "model.safetensors.index.json").read_text())
    modules = {tensor for tensor in tensors_of(name) if module_of(name, tensor) is not None}
    assert modules and not modules & index["weight_map"].keys()
    assert golden(name).names().keys() == tensors_of(name).keys()
