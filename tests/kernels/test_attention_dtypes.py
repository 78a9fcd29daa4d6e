"""bfloat16 inputs: float32 softmax and accumulation, the result in the dtype of the queries."""

from __future__ import annotations

import numpy as np
import pytest
from kernels.cases import check, make_batch


@pytest.mark.parametrize("window", [None, 20])
def test_bfloat16(window: int | None) -> None:
    check(make_batch(window=window).cast("bfloat16"), window=window)


def test_bfloat16_with_every_option() -> None:
    rng = np.random.default_rng(7)
    batch = make_batch(window=20).cast("bfloat16")
    check(
        batch,
        window=20,
        softcap=2.0,
        sinks=rng.standard_normal(4).astype(np.float32),
        rel_rows=rng.standard_normal((48, 4, 3)).astype(batch.q.dtype),
        rel_table=rng.standard_normal((3, 24)).astype(batch.q.dtype),
    )


def test_float32_queries_over_a_bfloat16_cache() -> None:
    """The result is as precise as the cache allows, not rounded again."""
    batch = make_batch()
    rounded = batch.cast("bfloat16")
    batch.k_pages[:], batch.v_pages[:] = rounded.k_pages, rounded.v_pages
    check(batch)
