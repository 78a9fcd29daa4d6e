"""How the values of modules are stored: matrices as bfloat16, or as int8 with a float32 scale per
output channel.

Vectors (norms, biases) and what the model keeps in float32 are stored as they are: they are few.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import ml_dtypes
import numpy as np

Storage = Literal["bfloat16", "int8"]
STORAGES: tuple[Storage, ...] = ("bfloat16", "int8")

_SCALE = ".channel_scale"
_LARGEST = 127


def stored(
    name: str, value: np.ndarray, storage: Storage, *, exact: bool = False
) -> dict[str, np.ndarray]:
    """The arrays that hold the parameter: one under its name, and for int8 its scales beside.

    Matrices are [..., in, out], and a channel is an entry of the last axis. `exact`: the parameter
    stays float32.
    """
    if exact or value.ndim < 2:
        keeps = value.dtype == ml_dtypes.bfloat16 and not exact
        return {name: value if keeps else value.astype(np.float32)}
    if storage == "bfloat16":
        return {name: value.astype(ml_dtypes.bfloat16)}
    wide = value.astype(np.float32)
    largest = np.abs(wide).max(axis=-2, keepdims=True)
    scale = np.where(largest > 0, largest / _LARGEST, 1).astype(np.float32)
    return {name: np.rint(wide / scale).astype(np.int8), name + _SCALE: scale}


def restored(name: str, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """The parameter from the arrays of `stored`: float32, or bfloat16 if it is stored so."""
    value = arrays[name]
    if value.dtype != np.int8:
        return value
    wide: np.ndarray = value.astype(np.float32) * arrays[name + _SCALE]
    return wide


def stored_shapes(
    name: str, shape: tuple[int, ...], storage: Storage, *, exact: bool = False
) -> dict[str, tuple[int, ...]]:
    """The shapes of the arrays of `stored`."""
    if exact or len(shape) < 2 or storage == "bfloat16":
        return {name: shape}
    return {name: shape, name + _SCALE: (*shape[:-2], 1, shape[-1])}
