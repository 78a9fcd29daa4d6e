"""Triton-lowered Pallas kernels: one launch writes all streams; another rotates, too.

Pages are whole arrays, aliased to the outputs: only the rows' places are touched.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels._compat import compiler_params, interpreted, load, store
from pallas_kernels.kv_write.rotation import Rotation

_ROWS = 16  # of a program
_COLUMNS = 512


def _as_array(layer: int | Array) -> Array:
    return jnp.asarray(layer, jnp.int32).reshape(1)


def kv_write(
    pages: dict[str, jax.Array],
    rows: dict[str, jax.Array],
    layer: int | Int[Array, ""],
    slots: Int32[Array, " T"],
) -> dict[str, jax.Array]:
    """See `api.kv_write`. Interpreted on a CPU."""
    names, num_rows = list(rows), slots.shape[0]
    widest = max(row.size // num_rows for row in rows.values())
    columns = min(pl.next_power_of_2(widest), _COLUMNS)

    def kernel(*refs: Any) -> None:
        slots_ref, layer_ref, *rest = refs
        row_refs, _, out_refs = (rest[i : i + len(names)] for i in range(0, len(rest), len(names)))
        row = pl.program_id(0) * _ROWS + jnp.arange(_ROWS)
        slot = load(slots_ref.at[row], mask=row < num_rows, other=-1)
        column = pl.program_id(1) * columns + jnp.arange(columns)
        for row_ref, out_ref in zip(row_refs, out_refs, strict=True):
            num_pages, size, *shape = out_ref.shape[1:]
            width = row_ref.shape[1] * (row_ref.shape[2] if len(shape) == 2 else 1)
            inner = (column // shape[1], column % shape[1]) if len(shape) == 2 else (column,)
            where = [part[None, :] for part in inner]
            mask = (slot >= 0)[:, None] & (column < width)[None, :]
            value = load(row_ref.at[row[:, None], *where], mask=mask, other=0)
            # Places that are not written are past the end: the interpreter would write old values.
            page = jnp.where(slot >= 0, slot // size, num_pages)
            place = out_ref.at[layer_ref[0], page[:, None], (slot % size)[:, None], *where]
            store(place, value.astype(out_ref.dtype), mask=mask)

    written = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(pages[name].shape, pages[name].dtype) for name in names],
        grid=(pl.cdiv(num_rows, _ROWS), pl.cdiv(widest, columns)),
        input_output_aliases={2 + len(names) + index: index for index in range(len(names))},
        compiler_params=compiler_params(num_warps=4, num_stages=1),
        interpret=interpreted(),
        name="kv_write",
    )(slots, _as_array(layer), *rows.values(), *(pages[name] for name in names))
    return dict(zip(names, written, strict=True))


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
    """See `api.rotate_and_write`. Interpreted on a CPU."""
    num_tokens, num_heads, _ = qkv.shape
    dim, value_dim, half = k_pages.shape[4], v_pages.shape[4], cos.shape[1]
    num_pages, size = k_pages.shape[1:3]
    group = (qkv.shape[2] - value_dim) // dim - 1
    lanes = group + 2  # heads of a token: queries, the key, the value
    # What is rotated as two halves, and the rest: (first entry, padded length, end).
    parts = [(0, pl.next_power_of_2(half), half), (half, pl.next_power_of_2(half), 2 * half)]
    if 2 * half < dim:
        parts.append((2 * half, pl.next_power_of_2(dim - 2 * half), dim))
    scales = [] if q_scale is None or k_scale is None else [q_scale, k_scale]

    def kernel(*refs: Any) -> None:
        qkv_ref, slots_ref, layer_ref, cos_ref, sin_ref, *rest = refs
        scale_refs, (q_ref, k_ref, v_ref) = rest[: len(scales)], rest[-3:]
        head, layer = pl.program_id(1), layer_ref[0]
        row = pl.program_id(0) * _ROWS + jnp.arange(_ROWS)
        token, lane = row // lanes, row % lanes
        real = token < num_tokens
        is_query, is_key, is_value = (
            real & (lane < group),
            real & (lane == group),
            real & (lane == group + 1),
        )
        slot = load(slots_ref.at[token], mask=real, other=-1)
        length = jnp.where(is_value, value_dim, dim)

        def piece(first: int, padded: int, end: int) -> Array:
            entry = first + jnp.arange(padded)
            mask = real[:, None] & (entry < end)[None, :] & (entry[None, :] < length[:, None])
            where = qkv_ref.at[token[:, None], head, lane[:, None] * dim + entry[None, :]]
            return load(where, mask=mask, other=0).astype(jnp.float32)

        raw = [piece(*part) for part in parts]
        turned = raw
        if scale_refs:
            squares = sum(jnp.sum(x * x, axis=1) for x in raw)
            inverse = jax.lax.rsqrt(squares / dim + rotation.eps)[:, None]

            def normed(x: Array, first: int, padded: int, end: int) -> Array:
                entry = first + jnp.arange(padded)
                q, k = (load(ref.at[entry], mask=entry < end, other=0) for ref in scale_refs)
                scale = jnp.where(is_query[:, None], q[None, :], k[None, :])
                x = x * inverse
                if rotation.one_plus:
                    x = x * (1 + scale.astype(jnp.float32))
                else:
                    x = x.astype(qkv.dtype) * scale.astype(qkv.dtype)
                return x.astype(qkv.dtype).astype(jnp.float32)

            turned = [normed(x, *part) for x, part in zip(raw, parts, strict=True)]
        entry = jnp.arange(parts[0][1])
        mask = real[:, None] & (entry < half)[None, :]
        where = token[:, None], entry[None, :]
        c, s = (load(ref.at[*where], mask=mask, other=0) for ref in (cos_ref, sin_ref))
        first, second, *others = turned
        turned = [first * c - second * s, second * c + first * s, *others]

        # Places that are not written are past the end: the interpreter would write old values.
        page = jnp.where(slot >= 0, slot // size, num_pages)[:, None]
        offset = (slot % size)[:, None]
        row_of_q = jnp.where(is_query, token, num_tokens)[:, None]
        for (first_entry, padded, end), new, old in zip(parts, turned, raw, strict=True):
            entry = (first_entry + jnp.arange(padded))[None, :]
            within = entry < end
            store(
                q_ref.at[row_of_q, (head * group + lane)[:, None], entry],
                new.astype(q_ref.dtype),
                mask=is_query[:, None] & within,
            )
            written = slot >= 0
            store(
                k_ref.at[layer, jnp.where(is_key[:, None], page, num_pages), offset, head, entry],
                new.astype(k_ref.dtype),
                mask=(is_key & written)[:, None] & within,
            )
            value = (old.astype(qkv.dtype) * rotation.value_scale).astype(v_ref.dtype)
            store(
                v_ref.at[layer, jnp.where(is_value[:, None], page, num_pages), offset, head, entry],
                value,
                mask=(is_value & written)[:, None] & within & (entry < value_dim),
            )

    inputs = [qkv, slots, _as_array(layer), cos, sin, *scales]
    q = jax.ShapeDtypeStruct((num_tokens, num_heads * group, dim), qkv.dtype)
    pages = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (k_pages, v_pages)]
    written: tuple[Array, Array, Array] = pl.pallas_call(
        kernel,
        out_shape=[q, *pages],
        grid=(pl.cdiv(num_tokens * lanes, _ROWS), num_heads),
        input_output_aliases={len(inputs): 1, len(inputs) + 1: 2},
        compiler_params=compiler_params(num_warps=4, num_stages=1),
        interpret=interpreted(),
        name="rotate_and_write",
    )(*inputs, k_pages, v_pages)
    return written
