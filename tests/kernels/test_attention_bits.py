"""Float32 rows of the "xla" implementation on a CPU are bit-identical in every schedule.

One request of 40 rows over 100 keys is computed whole and alone, then again in chunks, at other row
offsets, beside other requests, on other pages, under tables whose unused entries name NaN pages.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from kernels.cases import Batch, attend, make_batch

ROWS, KEYS = 40, 100


class Shape(NamedTuple):
    heads: tuple[int, int]
    dims: tuple[int, int]
    page: int
    window: int | None


# The first is a layer of SmolLM2-135M.
SHAPES = [
    Shape((9, 3), (64, 64), 16, None),
    Shape((4, 2), (8, 8), 16, 20),
    Shape((5, 1), (16, 8), 4, None),
]


@pytest.fixture(params=SHAPES, ids=str, scope="module")
def shape(request: pytest.FixtureRequest) -> Shape:
    return request.param


class Target(NamedTuple):
    """The request by position: queries of its rows, all its keys and values; and its output."""

    q: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    out: np.ndarray


@pytest.fixture(scope="module")
def target(shape: Shape) -> Target:
    heads, dims, page, window = shape
    batch = make_batch(
        [(ROWS, KEYS)], heads=heads, dims=dims, page=page, num_rows=ROWS, positions=112
    )
    position = np.arange(KEYS)
    where = 0, batch.page_table[0, position // page], position % page
    out = attend(batch, "xla", scale=0.25, window=window)
    return Target(batch.q, batch.k_pages[where], batch.v_pages[where], out)


def among_others(
    shape: Shape, target: Target, first: int, last: int, num_rows: int, others: int, seed: int
) -> np.ndarray:
    """Rows [first, last) of the target, computed in a batch with `others` random requests."""
    rng = np.random.default_rng(seed)
    left = num_rows - (last - first)
    requests = []
    for _ in range(others):
        rows = int(rng.integers(0, left // 2 + 1))
        requests.append((rows, rows + int(rng.integers(0, 112 - rows))))
        left -= rows
    index = int(rng.integers(0, others + 1))
    length = KEYS - ROWS + last
    requests.insert(index, (last - first, length))
    heads, dims, page, window = shape
    batch = make_batch(
        requests,
        heads=heads,
        dims=dims,
        page=page,
        num_rows=num_rows,
        positions=112,
        window=window,
        seed=seed,
    )
    start = batch.cu_q_lens[index]
    batch.q[start : start + last - first] = target.q[first:last]
    put_keys(batch, index, length, target)
    out = attend(batch, "xla", scale=0.25, window=window)
    return out[start : start + last - first]


def put_keys(batch: Batch, index: int, length: int, target: Target) -> None:
    """Make the keys and values of request `index` the target's, where it has pages."""
    page = batch.k_pages.shape[2]
    for position in range(length):
        number = batch.page_table[index, position // page]
        if number > 0:
            batch.k_pages[0, number, position % page] = target.keys[position]
            batch.v_pages[0, number, position % page] = target.values[position]


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(actual.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("size", [1, 3, 9, 17, 40])
def test_chunks_beside_other_requests(shape: Shape, target: Target, size: int) -> None:
    for first in range(0, ROWS, size):
        last = min(first + size, ROWS)
        rows = among_others(shape, target, first, last, num_rows=64, others=3, seed=size + first)
        assert_same_bits(rows, target.out[first:last])


@pytest.mark.parametrize("size", [1, 4])
def test_decode_windows_in_a_small_program(shape: Shape, target: Target, size: int) -> None:
    for first in range(0, ROWS, size):
        last = first + size
        rows = among_others(shape, target, first, last, num_rows=16, others=1, seed=first)
        assert_same_bits(rows, target.out[first:last])
