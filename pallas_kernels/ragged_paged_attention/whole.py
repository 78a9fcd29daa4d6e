"""Attention of equally long sequences, for training: plain products that jax differentiates.

Every request has T / B query rows; their positions are those of the layout contract. Scores of all
pairs are held at once, [B, Hq, T / B, MP * page] in float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

# Below every score; finite, so that rows that see nothing have derivatives.
_LOWEST = -1e30


def ragged_paged_attention(
    q: Float[Array, "T Hq D"],
    k_pages: Float[Array, "L P page Hkv D"],
    v_pages: Float[Array, "L P page Hkv Dv"] | None,
    layer: int | Int[Array, ""],
    page_table: Int32[Array, "B MP"],
    cu_q_lens: Int32[Array, "B+1"],
    kv_lens: Int32[Array, " B"],
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Float[Array, " Hq"] | None,
    rel_rows: Float[Array, "T Hq d_rel"] | None,
    rel_table: Float[Array, "d_rel E"] | None,
    value_dim: int | None,
) -> Float[Array, "T Hq Dv"]:
    """See `api.ragged_paged_attention`. `cu_q_lens` must be multiples of T / B."""
    num_rows, num_heads = q.shape[:2]
    num_requests, num_kv_heads = page_table.shape[0], k_pages.shape[3]
    if num_rows % num_requests:
        raise ValueError(
            f"query rows must be equally many for each of {num_requests} requests, got {num_rows}"
        )
    each, group = num_rows // num_requests, num_heads // num_kv_heads

    key = jnp.arange(page_table.shape[1] * k_pages.shape[2])
    position = (kv_lens - each)[:, None] + jnp.arange(each)  # [B, each]
    distance = position[:, :, None] - key  # [B, each, S]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    seen = jnp.any(visible, axis=1)[:, :, None, None]

    def gathered(pages: Array) -> Float[Array, "B S Hkv X"]:
        by_page = pages[layer, page_table]
        return jnp.where(seen, by_page.reshape(num_requests, -1, *pages.shape[3:]), 0)

    def by_request(rows: Array) -> Float[Array, "B each Hkv group X"]:
        return rows.reshape(num_requests, each, num_kv_heads, group, -1)

    keys = gathered(k_pages)
    values = keys[..., :value_dim] if v_pages is None else gathered(v_pages)
    scores = scale * jnp.einsum(
        "bqhgd,bshd->bhgqs", by_request(q), keys, preferred_element_type=jnp.float32
    )
    if rel_rows is not None and rel_table is not None:
        extent = rel_table.shape[1]
        bias = jnp.einsum("bqhgr,re->bhgqe", by_request(rel_rows), rel_table.astype(rel_rows.dtype))
        index = jnp.clip(distance, 0, extent - 1)[:, None, None]
        near = jnp.take_along_axis(bias.astype(jnp.float32), index, axis=4)
        scores += jnp.where((distance < extent)[:, None, None], near, 0.0)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(visible[:, None, None], scores, _LOWEST)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, num_kv_heads, group, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink, (*scores.shape[:4], 1))], axis=4)
    weights = jax.nn.softmax(scores, axis=4)[..., : keys.shape[1]].astype(values.dtype)
    out = jnp.einsum("bhgqs,bshd->bqhgd", weights, values, preferred_element_type=jnp.float32)
    return out.reshape(num_rows, num_heads, -1).astype(q.dtype)
