"""How parameters and caches are spread over devices: tensor parallelism over one mesh axis.

Heads, experts, the MLP's inner dimension and the vocabulary are split; everything else is copied.
The projections to queries, keys and values are one array: it is split by key heads, each with its
query heads, and copied where the devices cannot share the key heads evenly.

XLA's partitioner inserts the collectives, except for experts and attention's kernels, which run
under `shard_map`: every device has a share of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from mmtp_jax.cache.layout import CacheLayout
from mmtp_jax.checks import require

TENSOR_AXIS = "tensor"
SPLIT_AXES = frozenset({"heads", "kv_heads", "mlp", "experts", "vocab"})


def tensor_mesh(size: int) -> Mesh | None:
    """A mesh over the first `size` devices; None for one device."""
    if size == 1:
        return None
    devices = jax.devices()
    require(
        size <= len(devices),
        f"tensor_parallel_size must be <= the {len(devices)} device(s) here, got {size}",
    )
    return Mesh(np.array(devices[:size]), (TENSOR_AXIS,))


def current_mesh() -> AbstractMesh | None:
    """The mesh whose devices share the layers of the program being traced (`jax.set_mesh`); None
    without one."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if TENSOR_AXIS in mesh.axis_names else None


def kernels() -> str | None:
    """The implementation to ask for of a kernel that runs outside of `by_heads`: the best there is
    on one device; over a mesh that which XLA's partitioner can divide."""
    return None if current_mesh() is None else "xla"


def by_heads(
    function: Callable[..., Any],
    num_heads: int,
    inputs: tuple[int | None, ...],
    outputs: int | tuple[int | None, ...],
) -> Callable[..., Any]:
    """`function` as every device calls it for its share of the heads.

    `inputs` and `outputs` name the axis of each argument and result that goes along the heads
    (None: everybody has all of it; arguments may be None, too). On one device, and where the
    devices cannot share the heads evenly, that is `function` of everything.
    """
    mesh = current_mesh()
    if mesh is None:
        return function
    axis_name = TENSOR_AXIS if num_heads % mesh.size == 0 else None

    def spec(axis: int | None) -> PartitionSpec:
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, axis_name)

    results = spec(outputs) if isinstance(outputs, int) else tuple(map(spec, outputs))
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=tuple(map(spec, inputs)),
        out_specs=results,
        check_vma=False,
    )


def cache_sharding(mesh: Mesh, layout: CacheLayout) -> tuple[dict[str, NamedSharding], ...]:
    """The sharding of every stream's array [layers, pages, page, ...]: keys and values are split by
    heads (a latent, which all heads read, is copied)."""

    def of_stream(name: str, shape: tuple[int, ...]) -> NamedSharding:
        axes = (None, None, None, "kv_heads" if name in ("k", "v") else None)
        return split(mesh, axes, (1, 1, 1, shape[0]))

    return tuple(
        {name: of_stream(name, shape) for name, shape in group.streams} for group in layout.groups
    )


def split(
    mesh: Mesh | AbstractMesh, axes: tuple[str | None, ...], shape: tuple[int, ...]
) -> NamedSharding:
    """The sharding of an array with these logical axes; what the devices cannot share evenly is
    copied."""
    names = [
        TENSOR_AXIS if axis in SPLIT_AXES and size % mesh.size == 0 else None
        for axis, size in zip(axes, shape, strict=True)
    ]
    return NamedSharding(mesh, PartitionSpec(*names))
