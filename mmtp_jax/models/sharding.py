"""How parameters and caches are spread over devices: tensor parallelism over one mesh axis.

Heads, experts, the MLP's inner dimension and the vocabulary are split; everything else is copied.
The projections to queries, keys and values are one array: it is split by key heads, each with its
query heads, and copied where the devices cannot share the key heads evenly.

XLA's partitioner inserts the collectives, except for experts, which run under `shard_map`.
"""

from __future__ import annotations

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
    """The mesh that the program being traced runs on (`jax.set_mesh`); None without one."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def kernels() -> str | None:
    """The implementation of kernels to ask for: the best there is on one device; over a mesh that
    which XLA's partitioner can divide."""
    return None if current_mesh() is None else "xla"


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
