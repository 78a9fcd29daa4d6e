"""Scores by distance: `rel_rows . rel_table[:, distance]`, nothing beyond the table's end."""

from __future__ import annotations

import numpy as np
import pytest
from kernels.cases import assert_close, attend, check, make_batch


def relative(extent: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    return {
        "rel_rows": rng.standard_normal((48, 4, 3)).astype(np.float32),
        "rel_table": rng.standard_normal((3, extent)).astype(np.float32),
    }


@pytest.mark.parametrize(("extent", "window"), [(1, None), (24, None), (200, 20)])
def test_relative_rows(extent: int, window: int | None) -> None:
    check(make_batch(window=window), window=window, **relative(extent))


def test_with_softcap_and_sinks() -> None:
    sinks = np.linspace(-1, 1, 4, dtype=np.float32)
    check(make_batch(), softcap=1.5, sinks=sinks, **relative(24))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_large_bias_selects_one_distance(implementation: str) -> None:
    """A bias on distance 3 alone makes each row copy the value three positions before it."""
    batch = make_batch(((20, 20), (0, 0), (0, 0), (0, 0), (0, 0)))
    rel_table = np.zeros((3, 24), np.float32)
    rel_table[:, 3] = 100.0
    rel_rows = np.ones((48, 4, 3), np.float32)
    out = attend(batch, implementation, scale=0.25, rel_rows=rel_rows, rel_table=rel_table)
    values = batch.v_pages[0, batch.page_table[0]].reshape(-1, 2, 16)[:17]
    assert_close(out[3:20], np.repeat(values, 2, axis=1), 1e-6)
