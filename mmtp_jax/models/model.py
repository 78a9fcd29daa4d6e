"""Target and modules together, split once into a static graph and a pure parameter pytree."""

from __future__ import annotations

import dataclasses
import functools
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
from mmtp_jax.models.leaves import Leaf, pieces
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
            names, prefixes = list(map(str, path)), None
            if names[:2] == ["mtp", "runs"]:
                assert self.config.mtp is not None
                first, count = runs(self.config.mtp)[int(names[2])]
                names = names[3:]
                prefixes = [f"mtp.{module}." for module in range(first, first + count)]
            elif names[0] == "target":
                names = names[1:]
            facts = variable.get_metadata()
            shape, axes = tuple(variable.shape), facts["axes"]
            of_depth = shape
            if prefixes is not None:
                axes, of_depth = (None, *axes), shape[1:]
            parts = tuple(pieces(prefixes, names, of_depth, facts["joined"]))
            random = {name: facts[name] for name in ("mean", "std", "float32")}
            found.append(Leaf(parts, shape, axes, **random))
        return found

    def dtype(self, params: Params) -> np.dtype:
        """The model's dtype: that of all parameters but the few that are always float32."""
        leaves = zip(self.leaves(), params, strict=True)
        return next(np.dtype(value.dtype) for leaf, value in leaves if not leaf.float32)

    def values(self, params: Params) -> dict[str, jax.Array]:
        """The parameters by flat name, as checkpoints know them: what `assemble` was given."""
        leaves = zip(self.leaves(), params, strict=True)
        return dict(part for leaf, value in leaves for part in leaf.parts(value))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Flat name -> shape of every value a checkpoint has to provide."""
        return {piece.name: piece.shape for leaf in self.leaves() for piece in leaf.pieces}


def model_graph(config: ModelConfig, mesh: Mesh | None = None) -> ModelGraph:
    """Graph and parameter shapes without allocating anything."""
    graph, abstract = nnx.split(nnx.eval_shape(lambda: Model(config)))
    return ModelGraph(config, cache_layout(config), graph, abstract, mesh)


def assemble(
    graph: ModelGraph,
    values: Callable[[str], np.ndarray | jax.Array],
    order: Callable[[str], int] = lambda name: 0,
) -> Params:
    """All parameters on their devices: `values(name)` gives the array of a flat name, already in
    its dtype; it is called leaf by leaf, in ascending `order` of each leaf's first name.
    """
    leaves = graph.leaves()
    filled: dict[int, jax.Array] = {}
    for index in sorted(range(len(leaves)), key=lambda index: order(leaves[index].names[0])):
        leaf = leaves[index]
        whole = leaf.join(values)
        if graph.mesh is None:
            filled[index] = jnp.asarray(whole)
        else:
            filled[index] = jax.device_put(whole, split(graph.mesh, leaf.axes, leaf.shape))
    return tuple(filled[index] for index in range(len(leaves)))


def random_value(graph: ModelGraph, seed: int, dtype: np.dtype) -> Callable[[str], jax.Array]:
    """Random values by flat name (`load_format="dummy"`), made on the default device: on one kind
    of device, a function of (seed, name) alone."""
    declared = {piece.name: (leaf, piece.shape) for leaf in graph.leaves() for piece in leaf.pieces}
    key = jax.random.key(seed, impl="threefry2x32")

    def value(name: str) -> jax.Array:
        leaf, shape = declared[name]
        number = np.uint32(zlib.crc32(name.encode()))
        flat = _normal(key, number, leaf.mean, leaf.std, math.prod(shape), leaf.dtype(dtype))
        return flat.reshape(shape)

    return value


@functools.partial(jax.jit, static_argnames=("size", "dtype"))
def _normal(
    key: jax.Array, number: jax.Array, mean: jax.Array, std: jax.Array, size: int, dtype: np.dtype
) -> jax.Array:
    """Drawn flat, since many parameters of different shapes have the same size."""
    noise = jax.random.normal(jax.random.fold_in(key, number), (size,), jnp.float32)
    return (mean + std * noise).astype(dtype)
