"""The plain float32 statement of the function: every request's keys gathered, one softmax per row.

Memory grows with T * MP * page: for tests on small inputs.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32


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
    """See `api.ragged_paged_attention`."""
    num_rows, num_heads, _ = q.shape
    num_requests, table_width = page_table.shape
    page = k_pages.shape[2]
    row = jnp.arange(num_rows)
    request = jnp.searchsorted(cu_q_lens[1:], row, side="right", method="compare_all")
    real = row < cu_q_lens[-1]
    request = jnp.where(real, request, num_requests - 1)
    position = kv_lens[request] - (cu_q_lens[request + 1] - row)  # [T]

    span = jnp.arange(table_width * page)
    distance = position[:, None] - span  # [T, S]
    visible = (distance >= 0) & real[:, None]
    if window is not None:
        visible &= distance < window

    def gathered(pages: Array) -> Array:
        by_request = pages[layer, page_table].astype(jnp.float32)  # [B, MP, page, Hkv, D]
        by_request = by_request.reshape(num_requests, table_width * page, *pages.shape[3:])
        by_row = jnp.repeat(by_request[request], num_heads // pages.shape[3], axis=2)
        return jnp.where(visible[:, :, None, None], by_row, 0.0)  # [T, S, Hq, D]

    scores = jnp.einsum("thd,tshd->ths", q.astype(jnp.float32), gathered(k_pages)) * scale
    if rel_rows is not None and rel_table is not None:
        extent = rel_table.shape[1]
        by_distance = jnp.einsum("thr,re->the", rel_rows, rel_table, preferred_element_type="f4")
        index = jnp.clip(distance, 0, extent - 1)[:, None, :]
        bias = jnp.take_along_axis(by_distance, jnp.broadcast_to(index, scores.shape), axis=2)
        scores += jnp.where((distance < extent)[:, None, :], bias, 0.0)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(visible[:, None, :], scores, -jnp.inf)
    top = jnp.max(scores, axis=2, keepdims=True)
    if sinks is not None:
        top = jnp.maximum(top, sinks.astype(jnp.float32)[None, :, None])
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=2, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sinks.astype(jnp.float32)[None, :, None] - top)
    weights /= jnp.where(total > 0, total, 1.0)
    values = gathered(k_pages)[..., :value_dim] if v_pages is None else gathered(v_pages)
    out = jnp.einsum("ths,tshd->thd", weights, values)
    return jnp.where(real[:, None, None], out, 0.0).astype(q.dtype)
