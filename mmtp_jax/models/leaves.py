"""How the arrays that a step works on consist of the parameters that checkpoints know.

Outside every parameter has a flat name, "layers.0.attention.q.kernel" or "mtp.1.fuse.kernel". The
step's arrays are fewer: depths of equal modules are stacked, and projections of the same input are
joined.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import EllipsisType

import jax
import jax.numpy as jnp
import numpy as np

from mmtp_jax.models.parts import Joined

type Place = tuple[int | slice | EllipsisType, ...]


@dataclass(frozen=True)
class Piece:
    """A parameter outside: `array[place]` of a leaf's array, there of shape `shape`."""

    name: str
    place: Place
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Leaf:
    """One array of the step and its pieces: one per part of each depth.

    `shape` and the logical `axes` (None: depths) are those of the array. Random values have `mean`
    and `std`; `float32` leaves keep that dtype.
    """

    pieces: tuple[Piece, ...]
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    mean: float
    std: float
    float32: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The flat names outside."""
        return tuple(piece.name for piece in self.pieces)

    def dtype(self, of_model: np.dtype) -> np.dtype:
        return np.dtype(np.float32) if self.float32 else of_model

    @property
    def num_values(self) -> int:
        """Numbers in the array."""
        return math.prod(self.shape)

    def join(self, values: Callable[[str], np.ndarray | jax.Array]) -> np.ndarray | jax.Array:
        """The array, of the parameters by name: all in the host's memory, where each is copied into
        its place before the next is asked for, or all on a device."""
        first = values(self.names[0])
        if len(self.pieces) == 1:
            return first.reshape(self.shape)
        if isinstance(first, jax.Array):
            arrays = [first, *(values(name) for name in self.names[1:])]
            return _join(arrays, self.shape, tuple(piece.place for piece in self.pieces))
        whole = np.empty(self.shape, first.dtype)
        for index, piece in enumerate(self.pieces):
            place = whole[piece.place]
            value = values(piece.name) if index else first
            place[...] = value.reshape(place.shape)
        return whole

    def parts[A: (np.ndarray, jax.Array)](self, whole: A) -> Iterator[tuple[str, A]]:
        """The parameters by name: the inverse of `join`."""
        for piece in self.pieces:
            yield piece.name, whole[piece.place].reshape(piece.shape)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _join(arrays: list[jax.Array], shape: tuple[int, ...], places: tuple[Place, ...]) -> jax.Array:
    whole = jnp.empty(shape, arrays[0].dtype)
    for array, place in zip(arrays, places, strict=True):
        whole = whole.at[place].set(array.reshape(whole[place].shape))
    return whole


def pieces(
    prefixes: list[str] | None, path: list[str], shape: tuple[int, ...], joined: Joined | None
) -> Iterator[Piece]:
    """The pieces of the parameter of this path and shape, its depths' names below `prefixes` (None:
    it is not stacked)."""
    for depth, prefix in enumerate([""] if prefixes is None else prefixes):
        place: Place = (...,) if prefixes is None else (depth, ...)
        if joined is None:
            yield Piece(prefix + ".".join(path), place, shape)
            continue
        first = 0
        for name, size in joined.parts:
            part = list(shape)
            part[joined.axis] = size
            end = (slice(first, first + size), *(slice(None),) * (-1 - joined.axis))
            first += size
            kept = path[: len(path) - len(name.split("."))]
            flat = (*part[:-2], part[-2] * part[-1])
            yield Piece(prefix + ".".join([*kept, name]), (*place, *end), flat)
