"""The public functions: check arguments once, then pick an implementation by name.

A slot is a place in a layer's pages: page number * positions per page + offset. Rows with a
negative slot are not written; the slots of the others are distinct.
"""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels._implementations import implementation_of
from pallas_kernels.kv_write import triton, xla
from pallas_kernels.kv_write.rotation import Rotation

Streams = dict[str, jax.Array]
IMPLEMENTATIONS: dict[str, Any] = {"triton": triton, "xla": xla, "differentiable": xla}


def kv_write(
    pages: Streams,
    rows: Streams,
    layer: int | Int[Array, ""],
    slots: Int32[Array, " T"],
    *,
    implementation: str | None = None,
) -> Streams:
    """Write one row per slot into every stream named in `rows`.

    A stream's pages are [L, P, page, ...], its rows [T, ...] of any float dtype. Returns all of
    `pages`; where XLA may (donated arrays), they are written in place. The default implementation
    is "triton" on a GPU and "xla" elsewhere.

    Raises:
        ValueError: an unknown implementation, or shapes that do not fit together.
    """
    chosen = implementation_of(IMPLEMENTATIONS, implementation)
    for name, row in rows.items():
        if name not in pages or row.shape != (slots.shape[0], *pages[name].shape[3:]):
            found = pages[name].shape if name in pages else "missing"
            raise ValueError(f"rows {name!r} {row.shape} do not fit pages {found}")
    return pages | chosen.kv_write({name: pages[name] for name in rows}, rows, layer, slots)


def rotate_and_write(
    qkv: Float[Array, "T Hkv C"],
    k_pages: Float[Array, "L P page Hkv D"],
    v_pages: Float[Array, "L P page Hkv Dv"],
    layer: int | Int[Array, ""],
    slots: Int32[Array, " T"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    *,
    rotation: Rotation,
    q_scale: Float[Array, " D"] | None = None,
    k_scale: Float[Array, " D"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "T Hq D"], Float[Array, "L P page Hkv D"], Float[Array, "L P page Hkv Dv"]]:
    """Split a fused projection, normalise and rotate queries and keys, and write keys and values.

    The columns of a key head are those of its query heads, its key and its value. The first
    2 * half entries of queries and keys are rotated by the angles whose cosines and sines are given
    (entry i with entry half + i), after an RMS norm if there are scales; float32 inside. Returns
    the queries and the pages, written as by `kv_write`.

    Raises:
        ValueError: an unknown implementation, or shapes that do not fit together.
    """
    chosen = implementation_of(IMPLEMENTATIONS, implementation)
    dim, value_dim = k_pages.shape[4], v_pages.shape[4]
    queries = qkv.shape[2] - dim - value_dim
    if queries < dim or queries % dim or value_dim > dim or 2 * cos.shape[1] > dim:
        raise ValueError(
            f"{qkv.shape[2]} columns and {cos.shape[1]} angles do not fit keys of {dim} and values"
            f" of {value_dim} entries (at most as many)"
        )
    if (q_scale is None) != (k_scale is None):
        raise ValueError("q_scale and k_scale go together")
    arguments = (qkv, k_pages, v_pages, layer, slots, cos, sin, q_scale, k_scale)
    q, k_pages, v_pages = chosen.rotate_and_write(*arguments, rotation)
    return q, k_pages, v_pages
