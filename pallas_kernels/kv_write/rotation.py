"""What `rotate_and_write` does to queries, keys and values, besides rotating."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rotation:
    """`eps` and style of the norms (`one_plus`: times 1 + scale, in float32), and a factor of the
    values."""

    eps: float = 1e-6
    one_plus: bool = False
    value_scale: float = 1.0
