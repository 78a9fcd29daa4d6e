"""From a target and modules to a directory that other engines load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from mmtp_jax.config import EngineConfig, require
from mmtp_jax.export.mimo import mimo_config, mimo_model
from mmtp_jax.export.shards import LARGEST_FILE, write_tensors
from mmtp_jax.export.text import write_tokenizer
from mmtp_jax.families import mimo
from mmtp_jax.models.model import model_graph
from mmtp_jax.modules.checkpoint import open_modules
from mmtp_jax.modules.default import with_default_modules
from mmtp_jax.modules.reader import ModelReader
from mmtp_jax.progress import LoadingBar
from mmtp_jax.weights.checkpoint import open_checkpoint
from mmtp_jax.weights.directory import new_directory
from mmtp_jax.weights.resolve import resolve_model
from mmtp_jax.weights.safetensors_reader import read_json

DTYPES = ("bfloat16", "float32")


def export_mimo(
    folder: Path, config: EngineConfig, *, largest_file: int = LARGEST_FILE
) -> tuple[int, int]:
    """Write the model and its modules to `folder` in MiMo-7B's layout; the numbers of modules and
    of bytes.

    The modules are all of `config.speculative.model`, else those that come with a known model, else
    those that the checkpoint ships. `folder` appears whole or not at all.

    Raises `ConfigError` if `folder` is not empty, `ModelError` if the model cannot be had or the
    layout cannot say what it is.
    """
    require(config.dtype in DTYPES, f"dtype must be {' or '.join(DTYPES)}, got {config.dtype!r}")
    config = with_default_modules(config)
    checkpoint = open_checkpoint(resolve_model(config.model), config.hf_overrides)
    model, modules = checkpoint.config, None
    if config.speculative.model is not None:
        modules = open_modules(config.speculative.model)
        model = modules.beside(model)
    target = mimo_model(model)
    source, dtype = checkpoint.tokenizer_source, jnp.dtype(config.dtype)
    files = mimo_config(target, dtype.name, _generation(source))

    given, wanted = model_graph(model).shapes(), model_graph(target).shapes()
    reader = ModelReader(checkpoint, model, given, modules)
    tensors = {entry.names[0]: (path, entry) for path, entry in mimo.sources(target).items()}
    shapes = {name: entry.stored_shape(wanted[path]) for name, (path, entry) in tensors.items()}
    with new_directory(folder) as partial, LoadingBar(len(tensors)) as bar:

        def read(name: str) -> np.ndarray:
            bar.update()
            path, entry = tensors[name]
            if path not in given:  # a bias
                return np.zeros(wanted[path], dtype)
            value = reader.read(path, dtype)
            return value.T if entry.transpose else value

        size = write_tensors(partial, shapes, dtype, read, largest_file=largest_file)
        for name, content in zip(("config", "generation_config"), files, strict=True):
            text = json.dumps(content, indent=1) + "\n"
            (partial / f"{name}.json").write_text(text, encoding="utf-8")
        write_tokenizer(partial, source)
    return target.num_modules, size


def _generation(source: Path | Mapping[str, Any]) -> dict[str, Any]:
    """The source's generation_config.json, empty if it has none."""
    if not isinstance(source, Path) or not (source / "generation_config.json").exists():
        return {}
    return read_json(source / "generation_config.json")
