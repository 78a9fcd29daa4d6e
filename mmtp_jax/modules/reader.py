"""Parameters by name, wherever they lie: the target's checkpoint, or modules stored apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mmtp_jax.modules.checkpoint import ModuleCheckpoint
from mmtp_jax.specs import ModelConfig
from mmtp_jax.weights.checkpoint import Checkpoint
from mmtp_jax.weights.load import ParameterReader, Shapes


class ModelReader:
    """Reads the target's parameters from `checkpoint`, and "mtp.*" from `modules` or, without any,
    from `checkpoint` too.

    `config` and `expected` (the shape of every parameter) describe the model with the modules in
    use (`ModuleCheckpoint.beside`). Raises `ModelError` if tensors do not fit, or if the final norm
    is not that of the target of `modules`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        expected: Shapes,
        modules: ModuleCheckpoint | None,
    ) -> None:
        self._modules = modules
        if modules is None:
            self._target = ParameterReader(checkpoint, config, expected)
            return
        config, expected = target_only(config, expected)
        self._target = ParameterReader(checkpoint, config, expected)
        norm = self._target.read("norm.scale", np.dtype(np.float32))
        modules.identity.check_final_norm(norm)

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """The parameter as `dtype`."""
        if self._modules is not None and name.startswith("mtp."):
            return self._modules.read(name).astype(dtype)
        return self._target.read(name, dtype)

    def position(self, name: str) -> int:
        """Where the parameter lies among all of the checkpoint, for reading file after file."""
        if self._modules is not None and name.startswith("mtp."):
            return 0
        return self._target.position(name)


def target_only(
    config: ModelConfig, shapes: Shapes
) -> tuple[ModelConfig, dict[str, tuple[int, ...]]]:
    """The model without its modules, and the shapes of its parameters."""
    kept = {name: shape for name, shape in shapes.items() if not name.startswith("mtp.")}
    return replace(config, mtp=None), kept
