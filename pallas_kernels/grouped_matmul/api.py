"""The public function: checks arguments once, then picks an implementation by name."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels._implementations import implementation_of
from pallas_kernels.grouped_matmul import ragged, reference, triton, xla

IMPLEMENTATIONS = {
    "triton": triton.grouped_matmul,
    "xla": xla.grouped_matmul,
    "reference": reference.grouped_matmul,
    "differentiable": ragged.grouped_matmul,
}


def grouped_matmul(
    rows: Float[Array, "M K"],
    matrices: Float[Array, "E K N"],
    sizes: Int[Array, " E"],
    *,
    implementation: str | None = None,
) -> Float[Array, "M N"]:
    """Rows sorted by group times their group's matrix: the first `sizes[0]` rows times
    `matrices[0]`, and so on. Rows past `sum(sizes)` give zeros, whatever they hold.

    Accumulation is float32; the result has the rows' dtype. The default implementation is "triton"
    on a GPU and "xla" elsewhere.

    Raises:
        ValueError: an unknown implementation, or shapes that do not fit together.
    """
    chosen = implementation_of(IMPLEMENTATIONS, implementation)
    if rows.shape[1] != matrices.shape[1] or sizes.shape[0] != matrices.shape[0]:
        raise ValueError(
            f"rows {rows.shape}, matrices {matrices.shape} and sizes {sizes.shape} do not fit"
        )
    return chosen(rows, matrices, sizes)
