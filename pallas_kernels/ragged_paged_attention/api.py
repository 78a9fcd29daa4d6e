"""The public function: checks arguments once, then picks an implementation by name.

Layout contract. The query rows of request b are `q[cu_q_lens[b]:cu_q_lens[b + 1]]`; they are the
*last* rows of its `kv_lens[b]` keys, so row i sits at position `kv_lens[b] - q_len[b] + i`. Key
position s of request b lives at `pages[layer, page_table[b, s // page], s % page]`. Pages that no
visible key lies in may hold anything, NaN included.
"""

from __future__ import annotations

from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels._implementations import implementation_of
from pallas_kernels.ragged_paged_attention import reference, triton, whole, xla

IMPLEMENTATIONS = {
    "triton": triton.ragged_paged_attention,
    "xla": xla.ragged_paged_attention,
    "reference": reference.ragged_paged_attention,
    "differentiable": whole.ragged_paged_attention,
}


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
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " Hq"] | None = None,
    rel_rows: Float[Array, "T Hq d_rel"] | None = None,
    rel_table: Float[Array, "d_rel E"] | None = None,
    value_dim: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "T Hq Dv"]:
    """Causal attention of ragged query rows over paged keys and values.

    `score = q.k * scale + rel_rows . rel_table[:, distance]` (the bias only for distances below E),
    then `softcap * tanh(score / softcap)`, then the mask: a query at position t sees keys s <= t
    and, with a window, s > t - window. `sinks` add `exp(sink)` to the softmax denominator of each
    head. Without `v_pages` a key's first `value_dim` entries are its value (latent attention,
    arXiv 2405.04434). Softmax and accumulation are float32; the result has q's dtype. Rows past
    `cu_q_lens[-1]` are zero. The default implementation is "triton" on a GPU, where pages hold
    a power of two of positions, and "xla" elsewhere.

    Raises:
        ValueError: an unknown implementation, or shapes that do not fit together.
    """
    page = k_pages.shape[2]
    chosen = implementation_of(
        IMPLEMENTATIONS, implementation, fits=page == pl.next_power_of_2(page)
    )
    if q.shape[1] % k_pages.shape[3]:
        raise ValueError(
            f"query heads {q.shape[1]} must be a multiple of key heads {k_pages.shape[3]}"
        )
    if (rel_rows is None) != (rel_table is None):
        raise ValueError("rel_rows and rel_table go together")
    if (v_pages is None) == (value_dim is None):
        raise ValueError("give either v_pages or value_dim")
    if value_dim is not None and not 1 <= value_dim <= k_pages.shape[4]:
        raise ValueError(f"value_dim must be in [1, {k_pages.shape[4]}], got {value_dim}")
    if window is not None and window < 1:
        raise ValueError(f"window must be >= 1, got {window}")
    return chosen(
        q,
        k_pages,
        v_pages,
        layer,
        page_table,
        cu_q_lens,
        kv_lens,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        rel_rows=rel_rows,
        rel_table=rel_table,
        value_dim=value_dim,
    )
