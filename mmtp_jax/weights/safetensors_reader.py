"""Hugging Face directories: config.json and one or several *.safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from mmtp_jax.families.registry import parse_config
from mmtp_jax.families.settings import overridden
from mmtp_jax.weights.errors import ModelError

_DTYPES = ("F32", "BF16", "F16")


class SafetensorsCheckpoint:
    """A directory as a `Checkpoint`; `overrides` replace keys of its config.json.

    Without `with_weights` config.json alone is enough (for a model with dummy weights).
    """

    def __init__(
        self, directory: Path, overrides: Mapping[str, Any], *, with_weights: bool = True
    ) -> None:
        self._directory = directory
        generation = directory / "generation_config.json"
        self.config = parse_config(
            overridden(read_json(directory / "config.json"), overrides),
            read_json(generation) if generation.exists() else {},
            self._tensors.keys() if with_weights else None,
        )
        self.tokenizer_source = directory

    def names(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes by tensor name; `ModelError` when a file is missing, damaged or quantized."""
        return {name: shape for name, (_, shape) in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor as float32, bfloat16 or float16, as stored."""
        file, _ = self._tensors[name]
        tensor: np.ndarray = file.get_tensor(name)
        return tensor

    @cached_property
    def _tensors(self) -> dict[str, tuple[Any, tuple[int, ...]]]:
        """The open file and the shape of every tensor.

        All *.safetensors files count, in the index or not: MTP modules often ship in a file that
        the index does not name.
        """
        placed = self._index()
        paths = sorted(self._directory.glob("*.safetensors"))
        missing = set(placed.values()) - {path.name for path in paths}
        if missing:
            raise ModelError(
                f"{self._directory} lacks {', '.join(sorted(missing))}, named by its index"
            )
        if not paths:
            raise ModelError(f"{self._directory} has no *.safetensors file")
        tensors: dict[str, tuple[Any, tuple[int, ...]]] = {}
        for path in paths:
            for name, entry in _open(path).items():
                if placed.get(name, path.name) != path.name:
                    continue
                if name in tensors:
                    raise ModelError(f"{path} repeats the tensor {name} of another file")
                tensors[name] = entry
        return tensors

    def _index(self) -> dict[str, str]:
        path = self._directory / "model.safetensors.index.json"
        if not path.exists():
            return {}
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{path} has no weight_map")
        for name, file in weight_map.items():
            if not isinstance(file, str):
                raise ModelError(f"{path} places {name} in {file!r}, which is not a file's name")
        return weight_map


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; `ModelError` naming the file otherwise."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def _open(path: Path) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """The file's tensors, mapped into memory and not read yet."""
    try:
        file: Any = safe_open(path, framework="numpy")
        tensors = {}
        for name in file.keys():
            entry = file.get_slice(name)
            if entry.get_dtype() not in _DTYPES:
                raise ModelError(
                    f"{path} stores {name} as {entry.get_dtype()}; supported: {', '.join(_DTYPES)}"
                )
            tensors[name] = (file, tuple(entry.get_shape()))
        return tensors
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is truncated or not a safetensors file: {error}") from None
