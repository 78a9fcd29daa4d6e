"""Page sizes below, at and above the kernel's blocks of 64 keys, and tables of any order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernels.cases import assert_close, attend, check, make_batch

SMALL = ((18, 70), (1, 40))


@pytest.mark.parametrize(("page", "window"), [(1, None), (2, 33), (16, None), (64, 33)])
def test_page_sizes(page: int, window: int | None) -> None:
    batch = make_batch(SMALL, page=page, window=window, num_rows=20, positions=80)
    check(batch, window=window)


def test_a_table_of_fewer_positions_than_a_block() -> None:
    batch = make_batch(((5, 5), (1, 3)), num_rows=20, positions=16)
    check(batch)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_two_requests_may_share_pages(implementation: str) -> None:
    """The second request's first pages are the first request's, as after a prefix hit."""
    batch = make_batch(SMALL, num_rows=20, positions=80)
    shared = batch.page_table.copy()
    shared[1] = shared[0]
    both = replace(batch, requests=((18, 70), (1, 70)), page_table=shared)
    both.q[18] = both.q[17]
    out = attend(both, implementation, scale=0.25)
    assert np.isfinite(out).all()
    assert_close(out[18], out[17], 2e-6)
