"""Parameters of the oracle in float64, by flat name, and the two maps that every part uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from mmtp_jax.specs import ModelConfig

Values = Callable[[str], np.ndarray]


@dataclass(frozen=True)
class Parameters:
    """The parameters below a prefix."""

    config: ModelConfig
    values: Values
    prefix: str = ""
    known: dict[str, np.ndarray] = field(default_factory=dict)

    def at(self, name: str) -> Parameters:
        """The parameters below `name`."""
        return Parameters(self.config, self.values, f"{self.prefix}{name}.", self.known)

    def __getitem__(self, name: str) -> np.ndarray:
        path = self.prefix + name
        if path not in self.known:
            self.known[path] = np.asarray(self.values(path), np.float64)
        return self.known[path]

    def linear(self, name: str, x: np.ndarray, *, bias: bool = False) -> np.ndarray:
        y = x @ self[f"{name}.kernel"]
        return y + self[f"{name}.bias"] if bias else y

    def norm(self, name: str, x: np.ndarray, eps: float | None = None) -> np.ndarray:
        """RMSNorm over the last axis; zero-centred scales are offsets from one."""
        eps = self.config.norm_eps if eps is None else eps
        scale = self[f"{name}.scale"] + (1.0 if self.config.norm_style == "one_plus" else 0.0)
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * scale
