"""How parameters and caches are spread over devices: tensor parallelism over one mesh axis.

Heads, experts, the MLP's inner dimension and the vocabulary are split; everything else is copied.
XLA's partitioner inserts the collectives, except for experts, which run under `shard_map`.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from mmtp_jax.cache.layout import CacheLayout
from mmtp_jax.checks import require
from mmtp_jax.specs import AttentionSpec, LayerSpec, ModelConfig, MoESpec

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


def require_divisible(config: ModelConfig, size: int) -> None:
    """`ConfigError` unless `size` devices can share every split dimension of the model."""
    modules = () if config.mtp is None else config.mtp.modules
    counts = {"the embedding's rows": config.embedding_size}
    for layer in {*config.layers, *modules}:
        counts |= _split_counts(layer)
    for name, count in counts.items():
        require(
            count % size == 0,
            f"tensor_parallel_size ({size}) must divide {name} ({count}) of this model",
        )


def _split_counts(layer: LayerSpec) -> dict[str, int]:
    counts = {"num_heads": layer.attention.num_heads}
    if isinstance(layer.attention, AttentionSpec):
        counts["num_kv_heads"] = layer.attention.num_kv_heads
    if isinstance(layer.mlp, MoESpec):
        counts["num_experts"] = layer.mlp.num_experts
        if layer.mlp.shared is not None:
            counts["the shared expert's size"] = layer.mlp.shared.size
    else:
        counts["intermediate_size"] = layer.mlp.size
    return counts


def cache_sharding(mesh: Mesh, layout: CacheLayout) -> tuple[dict[str, NamedSharding], ...]:
    """The sharding of every stream's array [layers, pages, page, ...]: keys and values are split by
    heads (a latent, which all heads read, is copied)."""

    def of_stream(name: str, shape: tuple[int, ...]) -> NamedSharding:
        heads = "kv_heads" if name in ("k", "v") and shape[0] > 1 else None
        return split(mesh, (None, None, None, heads))

    return tuple(
        {name: of_stream(name, shape) for name, shape in group.streams} for group in layout.groups
    )


def split(mesh: Mesh, axes: tuple[str | None, ...]) -> NamedSharding:
    """The sharding of an array with these logical axes."""
    names = [TENSOR_AXIS if axis in SPLIT_AXES else None for axis in axes]
    return NamedSharding(mesh, PartitionSpec(*names))
