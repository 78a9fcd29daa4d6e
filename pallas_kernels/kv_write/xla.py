"""XLA implementation and reference: scatters, and plain arithmetic in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels.kv_write.rotation import Rotation


def kv_write(
    pages: dict[str, jax.Array],
    rows: dict[str, jax.Array],
    layer: int | Int[Array, ""],
    slots: Int32[Array, " T"],
) -> dict[str, jax.Array]:
    """See `api.kv_write`. Slots that are not written become a page past the pool, which scatter
    drops (a negative index would wrap around and be written even with mode="drop")."""

    def written(array: Array, row: Array) -> Array:
        num_pages, size = array.shape[1:3]
        page = jnp.where(slots >= 0, slots // size, num_pages)
        place = array.at[layer, page, slots % size]
        return place.set(row.astype(array.dtype), mode="drop")

    return {name: written(pages[name], row) for name, row in rows.items()}


def rotate_and_write(
    qkv: Float[Array, "T Hkv C"],
    k_pages: Float[Array, "L P page Hkv D"],
    v_pages: Float[Array, "L P page Hkv Dv"],
    layer: int | Int[Array, ""],
    slots: Int32[Array, " T"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    q_scale: Float[Array, " D"] | None,
    k_scale: Float[Array, " D"] | None,
    rotation: Rotation,
) -> tuple[Array, Array, Array]:
    """See `api.rotate_and_write`."""
    dim, half = k_pages.shape[4], cos.shape[1]
    queries = qkv.shape[2] - dim - v_pages.shape[4]
    q, k, v = jnp.split(qkv, [queries, queries + dim], axis=-1)
    q = q.reshape(q.shape[0], -1, dim)

    def normed(x: Array, scale: Array | None) -> Array:
        if scale is None:
            return x
        wide = x.astype(jnp.float32)
        wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + rotation.eps)
        if rotation.one_plus:
            return (wide * (1 + scale.astype(jnp.float32))).astype(x.dtype)
        return wide.astype(x.dtype) * scale.astype(x.dtype)

    def rotated(x: Array) -> Array:
        first, second = jnp.split(x[..., : 2 * half].astype(jnp.float32), 2, axis=-1)
        c, s = cos[:, None], sin[:, None]
        turned = jnp.concatenate([first * c - second * s, second * c + first * s], axis=-1)
        return jnp.concatenate([turned.astype(x.dtype), x[..., 2 * half :]], axis=-1)

    q, k = rotated(normed(q, q_scale)), rotated(normed(k, k_scale))
    if rotation.value_scale != 1.0:
        v = v * jnp.asarray(rotation.value_scale, v.dtype)
    written = kv_write({"k": k_pages, "v": v_pages}, {"k": k, "v": v}, layer, slots)
    return q, written["k"], written["v"]
