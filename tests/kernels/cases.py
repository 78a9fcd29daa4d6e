"""Random ragged paged batches for the attention tests, and attention spelled out in float64.

Everything that no query row may see is NaN: unused pages, the rest of used pages, what lies below
the window, the pages that unused table entries name, and padding rows of the queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ragged_paged_attention import ragged_paged_attention

# (query rows, keys) of every request: a chunk, decodes, a whole prompt, an empty request, a window
# of drafts. Row counts cross the kernel's tiles of 16 rows, key counts its blocks of 64.
MIXED = ((17, 70), (1, 90), (20, 20), (0, 0), (4, 66))
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Batch:
    """The arrays of one call, as numpy; `requests` holds (query rows, keys) of every request."""

    requests: tuple[tuple[int, int], ...]
    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    page_table: np.ndarray
    layer: int

    @property
    def cu_q_lens(self) -> np.ndarray:
        return np.cumsum([0, *(rows for rows, _ in self.requests)]).astype(np.int32)

    @property
    def kv_lens(self) -> np.ndarray:
        return np.array([keys for _, keys in self.requests], np.int32)

    @property
    def num_real(self) -> int:
        return sum(rows for rows, _ in self.requests)

    def cast(self, dtype: str) -> Batch:
        """The same batch with queries, keys and values rounded to `dtype`."""
        arrays = {name: getattr(self, name) for name in ("q", "k_pages", "v_pages")}
        return replace(
            self, **{name: np.asarray(jnp.asarray(a, dtype)) for name, a in arrays.items()}
        )


def make_batch(
    requests: Sequence[tuple[int, int]] = MIXED,
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16),
    page: int = 16,
    num_rows: int = 48,
    positions: int = 128,
    window: int | None = None,
    layers: int = 1,
    layer: int = 0,
    seed: int = 0,
) -> Batch:
    """Random float32 data: `num_rows` query rows (real and padding), tables for `positions` keys.

    `heads` are those of queries and of keys, `dims` the sizes of keys and of values. Shapes depend
    on these, on `page` and on the number of requests only. With a window, keys below it are NaN.
    """
    rng = np.random.default_rng(seed)
    width = -(-positions // page)
    num_pages = 1 + len(requests) * width
    owned = 1 + rng.permutation(num_pages - 1).reshape(len(requests), width)
    shape = (layers, num_pages, page, heads[1])
    k_pages = np.full((*shape, dims[0]), np.nan, np.float32)
    v_pages = np.full((*shape, dims[1]), np.nan, np.float32)
    page_table = np.zeros((len(requests), width), np.int32)  # page 0 stays NaN
    for request, (rows, keys) in enumerate(requests):
        oldest = 0 if window is None else max(keys - rows - window + 1, 0)
        seen = range(oldest if rows else keys, keys)
        for position in seen:
            number, offset = owned[request, position // page], position % page
            page_table[request, position // page] = number
            k_pages[layer, number, offset] = rng.standard_normal((heads[1], dims[0]))
            v_pages[layer, number, offset] = rng.standard_normal((heads[1], dims[1]))
    q = rng.standard_normal((num_rows, heads[0], dims[0])).astype(np.float32)
    batch = Batch(tuple(requests), q, k_pages, v_pages, page_table, layer)
    q[batch.num_real :] = np.nan
    return batch


def attention_in_float64(
    batch: Batch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    rel_rows: np.ndarray | None = None,
    rel_table: np.ndarray | None = None,
) -> np.ndarray:
    """[T, Hq, Dv] row by row and head by head; padding rows are zero."""
    q, k_pages, v_pages = (
        np.asarray(array, np.float64) for array in (batch.q, batch.k_pages, batch.v_pages)
    )
    page, group = k_pages.shape[2], q.shape[1] // k_pages.shape[3]
    out = np.zeros((*q.shape[:2], v_pages.shape[4]))
    row = 0
    for table, (rows, keys) in zip(batch.page_table, batch.requests, strict=True):
        for position in range(keys - rows, keys):
            first = 0 if window is None else max(position - window + 1, 0)
            seen = np.arange(first, position + 1)
            where = batch.layer, table[seen // page], seen % page
            for head in range(q.shape[1]):
                scores = k_pages[where][:, head // group] @ q[row, head] * scale
                if rel_rows is not None and rel_table is not None:
                    bias = np.float64(rel_rows[row, head]) @ np.float64(rel_table)
                    near = position - seen < len(bias)
                    scores[near] += bias[position - seen[near]]
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                top = scores.max() if sinks is None else max(scores.max(), sinks[head])
                weights = np.exp(scores - top)
                total = weights.sum()
                if sinks is not None:
                    total += np.exp(np.float64(sinks[head]) - top)
                out[row, head] = weights / total @ v_pages[where][:, head // group]
            row += 1
    return out


_jitted = jax.jit(
    ragged_paged_attention, static_argnames=("scale", "window", "softcap", "implementation")
)


def attend(batch: Batch, implementation: str, **options: Any) -> np.ndarray:
    """The function under test on `batch`, in one compiled program."""
    out = _jitted(
        batch.q,
        batch.k_pages,
        batch.v_pages,
        batch.layer,
        batch.page_table,
        batch.cu_q_lens,
        batch.kv_lens,
        implementation=implementation,
        **options,
    )
    assert out.dtype == batch.q.dtype
    return np.asarray(out)


def check(batch: Batch, *, scale: float = 0.25, **options: Any) -> np.ndarray:
    """Compare "reference" with float64, "xla" and "triton" (interpreted on a CPU) with "reference";
    returns what "xla" gives."""
    tolerance = TOLERANCE[str(batch.q.dtype)]
    exact = attention_in_float64(batch, scale=scale, **options)
    reference = attend(batch, "reference", scale=scale, **options)
    assert_close(reference, exact, tolerance)
    xla, triton = (attend(batch, name, scale=scale, **options) for name in ("xla", "triton"))
    for out in (xla, triton):
        assert_close(out, reference, tolerance)
    for out in (reference, xla, triton):
        assert not out[batch.num_real :].any(), "padding rows must be zero"
    return xla


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    """The error's norm is at most `tolerance` of the expected norm; NaN fails."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    error = np.linalg.norm(actual - expected)
    assert error <= tolerance * np.linalg.norm(expected), f"error {error}"
