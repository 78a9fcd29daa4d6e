"""Target and modules together, split once into a static graph and a pure parameter pytree."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmtp_jax.cache.layout import CacheLayout, cache_layout
from mmtp_jax.config import ModelConfig
from mmtp_jax.models.mtp import MTPStack, runs
from mmtp_jax.models.transformer import Transformer

# The parameters in the graph's order. A flat tuple: flattening hundreds of nnx variables costs
# milliseconds of Python in every call of a compiled program.
type Params = tuple[jax.Array, ...]


class Model(nnx.Module):
    """Container of every parameter the engine runs."""

    def __init__(self, config: ModelConfig) -> None:
        self.target = Transformer(config)
        self.mtp = MTPStack(config) if config.mtp is not None else None


@dataclasses.dataclass(frozen=True, eq=False)
class ModelGraph:
    """The static half of a model: module graph, parameter shapes, cache layout."""

    config: ModelConfig
    layout: CacheLayout
    graph: nnx.GraphDef[Model]
    abstract: nnx.State[Any, Any]

    def bind(self, params: Params) -> Model:
        """The module tree over (traced) parameters."""
        structure = jax.tree.structure(self.abstract)
        return nnx.merge(self.graph, jax.tree.unflatten(structure, params))

    def leaves(self) -> list[Leaf]:
        """The description of every parameter, in the order of `Params`."""
        found = []
        for path, variable in nnx.to_flat_state(self.abstract):
            part, *rest = map(str, path)
            if part == "target":
                names = [".".join(rest)]
            else:
                assert self.config.mtp is not None
                first, count = runs(self.config.mtp)[int(rest[1])]
                tail = ".".join(rest[2:])
                names = [f"mtp.{module}.{tail}" for module in range(first, first + count)]
            metadata = variable.get_metadata()
            shape = tuple(variable.shape[1:] if part == "mtp" else variable.shape)
            found.append(
                Leaf(tuple(names), shape, part == "mtp", metadata["mean"], metadata["std"])
            )
        return found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Flat name -> shape of every value a checkpoint has to provide."""
        return {name: leaf.shape for leaf in self.leaves() for name in leaf.names}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter: its flat names outside, one per depth if it is stacked over depths
    ("mtp.0.fuse.kernel", "mtp.1.fuse.kernel", ...), else one ("layers.0.mlp.up.kernel")."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    stacked: bool
    mean: float
    std: float


def model_graph(config: ModelConfig) -> ModelGraph:
    """Graph and parameter shapes without allocating anything."""
    graph, abstract = nnx.split(nnx.eval_shape(lambda: Model(config)))
    return ModelGraph(config, cache_layout(config), graph, abstract)


def assemble(
    graph: ModelGraph,
    values: Callable[[str], np.ndarray],
    place: Callable[[np.ndarray], jax.Array] = jnp.asarray,
) -> Params:
    """All parameters: `values(name)` gives the array of a flat name, already in its dtype."""
    filled = []
    for leaf in graph.leaves():
        parts = [values(name) for name in leaf.names]
        filled.append(place(np.stack(parts) if leaf.stacked else parts[0]))
    return tuple(filled)


def random_value(graph: ModelGraph, seed: int, dtype: np.dtype) -> Callable[[str], np.ndarray]:
    """Random values by flat name (`load_format="dummy"`): a function of (seed, name) alone."""
    declared = {name: leaf for leaf in graph.leaves() for name in leaf.names}

    def value(name: str) -> np.ndarray:
        leaf = declared[name]
        generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
        noise = generator.standard_normal(leaf.shape, dtype=np.float32)
        return (leaf.mean + leaf.std * noise).astype(dtype)

    return value
