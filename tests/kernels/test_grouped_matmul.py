"""Grouped products of sorted rows: every implementation against NumPy ("triton" is interpreted on a
CPU), its lowering for CUDA, and the kernel on a GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.aot import on_h200
from pallas_kernels.grouped_matmul import grouped_matmul

IMPLEMENTATIONS = ("triton", "xla", "reference", "differentiable")
ROWS, GROUPS, INNER, OUTER = 70, 5, 24, 10
TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2}

_jitted = jax.jit(grouped_matmul, static_argnames="implementation")
multiply = functools.partial(_jitted, implementation="xla")


def make(dtype: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows [ROWS, INNER] and matrices [GROUPS, INNER, OUTER]."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((ROWS, INNER))
    matrices = rng.standard_normal((GROUPS, INNER, OUTER))
    return rows.astype(jnp.dtype(dtype)), matrices.astype(jnp.dtype(dtype))


def product(rows: np.ndarray, matrices: np.ndarray, sizes: list[int]) -> np.ndarray:
    """Float64, one group after the other."""
    wide, stack = rows.astype(np.float64), matrices.astype(np.float64)
    out, first = np.zeros((ROWS, OUTER)), 0
    for matrix, size in zip(stack, sizes, strict=True):
        out[first : first + size] = wide[first : first + size] @ matrix
        first += size
    return out


def check(sizes: list[int], dtype: str) -> None:
    """Every implementation, with NaN in the rows that belong to no group."""
    rows, matrices = make(dtype)
    total = sum(sizes)
    rows[total:] = np.nan
    want = product(rows, matrices, sizes)
    for implementation in IMPLEMENTATIONS:
        out = _jitted(rows, matrices, np.int32(sizes), implementation=implementation)
        assert out.dtype == rows.dtype
        got = np.asarray(out).astype(np.float64)
        assert not got[total:].any(), "rows of no group must be zero"
        error = np.linalg.norm(got - want)
        assert error <= TOLERANCE[dtype] * np.linalg.norm(want), implementation


@pytest.mark.parametrize("dtype", TOLERANCE)
@settings(max_examples=50)
@given(cuts=st.lists(st.integers(0, ROWS), min_size=GROUPS, max_size=GROUPS))
def test_any_sizes(dtype: str, cuts: list[int]) -> None:
    """Sorted cuts: equal ones are empty groups; the rows after the last belong to none."""
    check(np.diff([0, *sorted(cuts)]).tolist(), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "sizes",
    [
        [0, 0, 0, 0, 0],
        [ROWS, 0, 0, 0, 0],
        [0, 0, ROWS, 0, 0],
        [0, 0, 0, 0, ROWS],
        [1, 0, 1, 0, 1],
        [16, 32, 0, 15, 7],  # whole blocks, one row less, and what is left
        [17, 1, 33, 0, 19],
    ],
    ids=str,
)
def test_sizes_around_blocks(sizes: list[int], dtype: str) -> None:
    check(sizes, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@settings(max_examples=50)
@given(
    sizes=st.lists(st.integers(0, 14), min_size=GROUPS, max_size=GROUPS),
    group=st.integers(0, GROUPS - 1),
    place=st.integers(0, 13),
    seed=st.integers(1, 2**16),
)
def test_bits_of_a_row_do_not_depend_on_the_others(
    dtype: str, sizes: list[int], group: int, place: int, seed: int
) -> None:
    """The same row as the only one, and anywhere in its group beside other rows."""
    rows, matrices = make(dtype)
    alone = (np.arange(GROUPS) == group).astype(np.int32)
    want = multiply(rows[:1], matrices, alone)[0]
    sizes[group] = max(sizes[group], place + 1)
    at = sum(sizes[:group]) + place
    others, strange = make(dtype, seed)
    others[at], strange[group] = rows[0], matrices[group]
    got = multiply(others, strange, np.int32(sizes))[at]
    assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


def test_accumulation_is_float32() -> None:
    """256 ones and 1024 times 1/256: a sum in bfloat16 would stay at 256."""
    rows = np.ones((1, 1280), jnp.bfloat16)
    rows[0, 256:] = 2.0**-8
    matrices = np.ones((1, 1280, 1), jnp.bfloat16)
    for implementation in IMPLEMENTATIONS:
        got = _jitted(rows, matrices, np.int32([1]), implementation=implementation)
        assert float(got[0, 0]) == 260


def test_an_unknown_implementation_is_refused() -> None:
    rows, matrices = (jnp.asarray(array) for array in make("float32"))
    with pytest.raises(ValueError, match=r"reference, differentiable, got 'cuda'"):
        grouped_matmul(rows, matrices, jnp.zeros(GROUPS, jnp.int32), implementation="cuda")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("num_rows", [1, 54, 1000, 24576])  # every block size
def test_lowers_for_cuda(num_rows: int, dtype: str) -> None:
    """Odd sizes too: blocks are powers of two, the arrays are not."""
    shapes = ((num_rows, 2050), (64, 2050, 770))
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    sizes = jax.ShapeDtypeStruct((64,), jnp.int32)
    with on_h200():
        traced = jax.jit(grouped_matmul).trace(*arguments, sizes)
        assert "triton" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("num_rows", [1, 54, 1000, 24576])
def test_on_a_gpu(num_rows: int, dtype: str) -> None:
    """Fresh random inputs against float32; some groups empty, NaN in the rows of none."""
    rng = np.random.default_rng()
    groups, inner, columns = 64, 514, 258
    sizes = rng.multinomial(num_rows - num_rows // 10, rng.dirichlet(np.full(groups, 0.5)))
    rows = rng.standard_normal((num_rows, inner)).astype(jnp.dtype(dtype))
    rows[sizes.sum() :] = np.nan
    matrices = rng.standard_normal((groups, inner, columns)).astype(jnp.dtype(dtype))
    out = jax.jit(grouped_matmul)(rows, matrices, np.int32(sizes))
    got = np.asarray(out).astype(np.float64)
    group = np.repeat(np.arange(groups), sizes)
    want = np.zeros_like(got)
    for index in np.unique(group):
        mine = np.flatnonzero(group == index)
        want[mine] = rows[mine].astype(np.float64) @ matrices[index].astype(np.float64)
    assert not got[sizes.sum() :].any()
    tolerance = {"float32": 1e-5, "bfloat16": 1e-2}[dtype]
    assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)
