"""bfloat16 inputs: float32 softmax and accumulation, the result in the dtype of the queries."""

from __future__ import annotations

import numpy as np
import pytest
from kernels.cases import assert_close, attend, attention_in_float64, check, make_batch


@pytest.mark.parametrize("window", [None, 20])
def test_bfloat16(window: int | None) -> None:
    check(make_batch(window=window).cast("bfloat16"), window=window)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_scores_are_not_rounded(implementation: str) -> None:
    """Large scores lose whole units in bfloat16: only the result may be rounded (by 2**-9)."""
    batch = make_batch().cast("bfloat16")
    exact = attention_in_float64(batch, scale=8.0)
    assert_close(attend(batch, implementation, scale=8.0), exact, 4e-3)


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
