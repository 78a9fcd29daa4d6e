"""Sliding windows: a row sees itself and the `window - 1` keys before it."""

from __future__ import annotations

import numpy as np
import pytest
from kernels.cases import assert_close, attend, check, make_batch


@pytest.mark.parametrize("window", [1, 5, 64])
def test_windows(window: int) -> None:
    check(make_batch(window=window), window=window)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_window_one_copies_the_rows_own_value(implementation: str) -> None:
    batch = make_batch(((20, 20), (0, 0), (0, 0), (0, 0), (0, 0)), window=1)
    out = attend(batch, implementation, scale=0.25, window=1)
    own = batch.v_pages[0, batch.page_table[0]].reshape(-1, 2, 16)[:20]
    np.testing.assert_array_equal(out[:20], np.repeat(own, 2, axis=1))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_window_over_the_whole_context_changes_nothing(implementation: str) -> None:
    batch = make_batch()
    plain = attend(batch, implementation, scale=0.25)
    assert_close(attend(batch, implementation, scale=0.25, window=128), plain, 1e-7)
