"""Which rows belong to which request, at which position."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.cases import attend, check, make_batch


@pytest.mark.parametrize(
    "requests",
    [
        ((17, 70), (1, 90), (20, 20), (0, 0), (4, 66)),
        ((1, 1), (1, 64), (1, 65), (1, 128), (1, 2)),
        ((0, 0), (0, 30), (48, 128), (0, 0), (0, 0)),
        ((0, 0), (16, 16), (16, 80), (0, 5), (15, 15)),
    ],
    ids=["mixed", "decode", "one chunk", "empty requests"],
)
def test_batches(requests: tuple[tuple[int, int], ...]) -> None:
    check(make_batch(requests))


def test_a_batch_without_rows_is_all_zero() -> None:
    batch = make_batch(((0, 0),) * 5)
    for implementation in ("reference", "xla"):
        assert not attend(batch, implementation, scale=0.25).any()


@st.composite
def ragged(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    """Five requests of 48 rows in all at most, each with at most 128 keys."""
    requests, left = [], 48
    for _ in range(5):
        rows = draw(st.integers(0, min(left, 40)))
        requests.append((rows, rows + draw(st.integers(0, 128 - rows))))
        left -= rows
    return tuple(requests)


@given(requests=ragged(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15)
def test_any_batch(requests: tuple[tuple[int, int], ...], seed: int) -> None:
    check(make_batch(requests, seed=seed))


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    batch = make_batch()
    out = check(batch, scale=25.0)
    assert np.isfinite(out).all()
