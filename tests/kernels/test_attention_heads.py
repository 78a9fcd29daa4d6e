"""Groups of query heads that share a key head, and keys of another size than values."""

from __future__ import annotations

import pytest
from kernels.cases import check, make_batch

SMALL = ((18, 70), (1, 40))


@pytest.mark.parametrize(
    ("heads", "dims"),
    [
        ((3, 3), (16, 16)),
        ((9, 3), (64, 64)),
        ((8, 2), (64, 32)),
        ((5, 1), (8, 16)),
        ((14, 2), (16, 16)),
    ],
    ids=["group 1", "group 3", "group 4", "group 5", "group 7"],
)
def test_groups(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    check(make_batch(SMALL, heads=heads, dims=dims, num_rows=20, positions=80))
