"""Target and modules together, split once into a static graph and a pure parameter pytree."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmtp_jax.cache.layout import CacheLayout, cache_layout
from mmtp_jax.models.mtp import MTPStack, runs
from mmtp_jax.models.sharding import split
from mmtp_jax.models.transformer import Transformer
from mmtp_jax.specs import ModelConfig

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
    """The static half of a model: module graph, parameter shapes, cache layout, and the devices it
    is spread over (None: one).
    """

    config: ModelConfig
    layout: CacheLayout
    graph: nnx.GraphDef[Model]
    abstract: nnx.State[Any, Any]
    mesh: Mesh | None

    def bind(self, params: Params) -> Model:
        """The module tree over (traced) parameters."""
        structure = jax.tree.structure(self.abstract)
        return nnx.merge(self.graph, jax.tree.unflatten(structure, params))

    def leaves(self) -> list[Leaf]:
        """The description of every parameter, in the order of `Params`."""
        found = []
        for path, variable in nnx.to_flat_state(self.abstract):
            part, *rest = map(str, path)
            stacked = part == "mtp" and rest[0] == "runs"
            if stacked:
                assert self.config.mtp is not None
                first, count = runs(self.config.mtp)[int(rest[1])]
                tail = ".".join(rest[2:])
                names = [f"mtp.{module}.{tail}" for module in range(first, first + count)]
            else:
                names = [".".join(rest if part == "target" else (part, *rest))]
            metadata = variable.get_metadata()
            shape = tuple(variable.shape[1:] if stacked else variable.shape)
            facts = {name: metadata[name] for name in ("axes", "mean", "std", "float32")}
            found.append(Leaf(tuple(names), shape, stacked, **facts))
        return found

    def dtype(self, params: Params) -> np.dtype:
        """The model's dtype: that of all parameters but the few that are always float32."""
        leaves = zip(self.leaves(), params, strict=True)
        return next(np.dtype(value.dtype) for leaf, value in leaves if not leaf.float32)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Flat name -> shape of every value a checkpoint has to provide."""
        return {name: leaf.shape for leaf in self.leaves() for name in leaf.names}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter: its flat names outside, one per depth if it is stacked over depths
    ("mtp.0.fuse.kernel", "mtp.1.fuse.kernel", ...), else one ("layers.0.mlp.up.kernel").

    `shape` and the logical `axes` are those of one depth. Random values have `mean` and `std`;
    `float32` parameters keep that dtype."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    stacked: bool
    axes: tuple[str, ...]
    mean: float
    std: float
    float32: bool

    def dtype(self, of_model: np.dtype) -> np.dtype:
        return np.dtype(np.float32) if self.float32 else of_model

    @property
    def num_values(self) -> int:
        """Numbers in the parameter, all depths together."""
        return len(self.names) * math.prod(self.shape)


def model_graph(config: ModelConfig, mesh: Mesh | None = None) -> ModelGraph:
    """Graph and parameter shapes without allocating anything."""
    graph, abstract = nnx.split(nnx.eval_shape(lambda: Model(config)))
    return ModelGraph(config, cache_layout(config), graph, abstract, mesh)


def assemble(
    graph: ModelGraph,
    values: Callable[[str], np.ndarray],
    order: Callable[[str], int] = lambda name: 0,
) -> Params:
    """All parameters on their devices: `values(name)` gives the array of a flat name, already in
    its dtype; it is called in ascending `order` of each parameter's first name.
    """
    leaves = graph.leaves()
    filled: dict[int, jax.Array] = {}
    for index in sorted(range(len(leaves)), key=lambda index: order(leaves[index].names[0])):
        leaf = leaves[index]
        if leaf.stacked:
            first = values(leaf.names[0])
            value = np.empty((len(leaf.names), *first.shape), first.dtype)
            value[0] = first
            for depth, name in enumerate(leaf.names[1:], start=1):
                value[depth] = values(name)
        else:
            value = values(leaf.names[0])
        filled[index] = _placed(graph, leaf, value)
    return tuple(filled[index] for index in range(len(leaves)))


def _placed(graph: ModelGraph, leaf: Leaf, value: np.ndarray) -> jax.Array:
    if graph.mesh is None:
        return jnp.asarray(value)
    axes = (None, *leaf.axes) if leaf.stacked else leaf.axes
    return jax.device_put(value, split(graph.mesh, axes, value.shape))


def random_value(graph: ModelGraph, seed: int, dtype: np.dtype) -> Callable[[str], np.ndarray]:
    """Random values by flat name (`load_format="dummy"`): a function of (seed, name) alone."""
    declared = {name: leaf for leaf in graph.leaves() for name in leaf.names}

    def value(name: str) -> np.ndarray:
        leaf = declared[name]
        generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
        noise = generator.standard_normal(leaf.shape, dtype=np.float32)
        return (leaf.mean + leaf.std * noise).astype(leaf.dtype(dtype))

    return value
