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

from mmtp_jax.config import ModelConfig
from mmtp_jax.models.layout import CacheLayout, cache_layout
from mmtp_jax.models.mtp import MTPStack, runs
from mmtp_jax.models.transformer import Transformer

type Params = nnx.State[Any, Any]


class Model(nnx.Module):
    """Container of every parameter the engine runs."""

    def __init__(self, config: ModelConfig) -> None:
        self.target = Transformer(config)
        self.mtp = MTPStack(config) if config.mtp is not None else None


@dataclasses.dataclass(frozen=True)
class ModelGraph:
    """The static half of a model: what the step needs beside the parameters."""

    config: ModelConfig
    layout: CacheLayout
    graph: nnx.GraphDef[Model]

    def bind(self, params: Params) -> Model:
        """The module tree over (traced) parameters."""
        return nnx.merge(self.graph, params)


def abstract_model(config: ModelConfig) -> tuple[ModelGraph, Params]:
    """Graph and parameter shapes without allocating anything."""
    model = nnx.eval_shape(lambda: Model(config))
    graph, params = nnx.split(model)
    return ModelGraph(config, cache_layout(config), graph), params


def flat_names(config: ModelConfig, params: Params) -> dict[tuple[Any, ...], list[str]]:
    """Parameter path -> the flat names its values are known by outside.

    One name for a target parameter ("layers.0.mlp.up.kernel"); one per depth for a stacked module
    parameter ("mtp.0.fuse.kernel", "mtp.1.fuse.kernel", ...), in stacking order.
    """
    names = {}
    for path, _ in nnx.to_flat_state(params):
        part, *rest = map(str, path)
        if part == "target":
            names[path] = [".".join(rest)]
        else:
            assert config.mtp is not None
            first, count = runs(config.mtp)[int(rest[1])]
            tail = ".".join(rest[2:])
            names[path] = [f"mtp.{module}.{tail}" for module in range(first, first + count)]
    return names


def expected_shapes(config: ModelConfig, params: Params) -> dict[str, tuple[int, ...]]:
    """Flat name -> shape of every parameter a checkpoint has to provide."""
    shapes = {}
    names = flat_names(config, params)
    for path, leaf in nnx.to_flat_state(params):
        stacked = path[0] == "mtp"
        for name in names[path]:
            shapes[name] = tuple(leaf.shape[1:] if stacked else leaf.shape)
    return shapes


def assemble(
    config: ModelConfig,
    params: Params,
    values: Callable[[str], np.ndarray],
    place: Callable[[np.ndarray], jax.Array] = jnp.asarray,
) -> Params:
    """Fill the abstract tree: `values(name)` gives the array of a flat name, already in its
    dtype.
    """
    names = flat_names(config, params)
    filled = []
    for path, leaf in nnx.to_flat_state(params):
        parts = [values(name) for name in names[path]]
        array = np.stack(parts) if path[0] == "mtp" else parts[0]
        filled.append((path, leaf.replace(place(array))))
    return nnx.from_flat_state(filled)


def random_value(
    params: Params, config: ModelConfig, seed: int, dtype: np.dtype
) -> Callable[[str], np.ndarray]:
    """Random values by flat name (`load_format="dummy"`): a function of (seed, name) alone."""
    names = flat_names(config, params)
    declared = {name: leaf for path, leaf in nnx.to_flat_state(params) for name in names[path]}
    shapes = expected_shapes(config, params)

    def value(name: str) -> np.ndarray:
        generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
        metadata = declared[name].get_metadata()
        noise = generator.standard_normal(shapes[name], dtype=np.float32)
        return (metadata["mean"] + metadata["std"] * noise).astype(dtype)

    return value
