"""What every weight format looks like to the rest of the package.

A checkpoint names its tensors and orients them as Hugging Face does, whatever the file format, so
that the key maps of `mmtp_jax.families` serve all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from mmtp_jax.specs import ModelConfig
from mmtp_jax.weights.errors import ModelError
from mmtp_jax.weights.gguf_reader import GGUFCheckpoint
from mmtp_jax.weights.safetensors_reader import SafetensorsCheckpoint


@runtime_checkable
class Checkpoint(Protocol):
    """An opened checkpoint; tensors are read one at a time."""

    @property
    def config(self) -> ModelConfig:
        """The model, with all MTP modules that the checkpoint ships."""
        ...

    @property
    def tokenizer_source(self) -> Path | Mapping[str, Any]:
        """What `load_tokenizer` needs: the directory, or the metadata of a GGUF file."""
        ...

    def names(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor by name; linear layers are [out, in]."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor, in the float dtype it is stored in (float32 when it was quantized)."""
        ...


def open_checkpoint(
    path: Path, overrides: Mapping[str, Any] | None = None, *, with_weights: bool = True
) -> Checkpoint:
    """Open a GGUF file or a Hugging Face directory, whose config.json `overrides` may change.

    Raises `ModelError` when the files are missing, damaged, or of a model that is not implemented.
    """
    if path.is_dir():
        return SafetensorsCheckpoint(path, overrides or {}, with_weights=with_weights)
    if path.is_file():
        if overrides:
            raise ModelError(f"hf_overrides change a config.json, which {path.name} has not")
        return GGUFCheckpoint(path)
    raise ModelError(f"there is no model at {path}")
