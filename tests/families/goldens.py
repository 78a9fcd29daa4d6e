"""The tiny checkpoints of tests/parity/goldens, as they are and with something changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from mmtp_jax.models.model import ModelGraph, model_graph
from mmtp_jax.specs import ModelConfig
from mmtp_jax.weights.checkpoint import Checkpoint, open_checkpoint
from mmtp_jax.weights.load import ParameterReader

ROOT = Path(__file__).resolve().parents[1] / "parity" / "goldens"
GOLDENS = sorted(path.name for path in ROOT.iterdir())
FLOAT32 = np.dtype(np.float32)


@cache
def golden(name: str) -> Checkpoint:
    return open_checkpoint(ROOT / name)


def golden_config(name: str) -> dict[str, Any]:
    """Its config.json."""
    config: dict[str, Any] = json.loads((ROOT / name / "config.json").read_text())
    return config


@cache
def graph(config: ModelConfig) -> ModelGraph:
    return model_graph(config)


@cache
def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter."""
    return graph(config).shapes()


def reader(checkpoint: Checkpoint, config: ModelConfig | None = None) -> ParameterReader:
    """Over the parameters of `config` (None: all that the checkpoint has)."""
    model = checkpoint.config if config is None else config
    return ParameterReader(checkpoint, model, shapes(model))


def read_all(
    checkpoint: Checkpoint, config: ModelConfig | None = None, dtype: np.dtype = FLOAT32
) -> dict[str, np.ndarray]:
    """Every parameter."""
    found = reader(checkpoint, config)
    return {path: found.read(path, dtype) for path in shapes(config or checkpoint.config)}


class Edited:
    """A checkpoint with some tensors replaced, added or (None) removed; it records what is read."""

    def __init__(
        self, checkpoint: Checkpoint, changes: Mapping[str, np.ndarray | None] | None = None
    ) -> None:
        self.config = checkpoint.config
        self.tokenizer_source = checkpoint.tokenizer_source
        self.read_names: list[str] = []
        self._checkpoint, self._changes = checkpoint, changes or {}

    def names(self) -> Mapping[str, tuple[int, ...]]:
        stored = dict(self._checkpoint.names())
        for name, tensor in self._changes.items():
            if tensor is None:
                del stored[name]
            else:
                stored[name] = tensor.shape
        return stored

    def read(self, name: str) -> np.ndarray:
        self.read_names.append(name)
        tensor = self._changes.get(name)
        return self._checkpoint.read(name) if tensor is None else tensor


def copied(name: str, directory: Path, config: Mapping[str, Any] | None = None) -> Path:
    """A copy of a golden's files in `directory`, `config` in place of its config.json."""
    unneeded = shutil.ignore_patterns("golden.npz", "config_hf.json")
    shutil.copytree(ROOT / name, directory, ignore=unneeded, dirs_exist_ok=True)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return directory


def tensors_of(name: str) -> dict[str, np.ndarray]:
    """All tensors of a golden, from all its files."""
    found: dict[str, np.ndarray] = {}
    for path in sorted((ROOT / name).glob("*.safetensors")):
        found |= load_file(path)
    return found


def rewritten(
    name: str, directory: Path, files: Mapping[str, Mapping[str, np.ndarray]], *, index: bool
) -> Path:
    """The golden's config.json in `directory` with other weight files, in the index or without."""
    copied(name, directory)
    for path in (*directory.glob("*.safetensors"), directory / "model.safetensors.index.json"):
        path.unlink(missing_ok=True)
    weight_map = {}
    for file, tensors in files.items():
        save_file(dict(tensors), directory / file)
        weight_map |= dict.fromkeys(tensors, file)
    if index:
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (directory / "model.safetensors.index.json").write_text(text)
    return directory
