"""What is lost when values are stored: nothing in bfloat16, half a step of each block in int8."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from mmtp_jax.modules.storage import BLOCK, STORAGES, Storage, restored, stored, stored_shapes


def normal(*shape: int) -> np.ndarray:
    scale = np.exp(np.random.default_rng(1).normal(size=shape[-1]))
    return (np.random.default_rng(0).normal(size=shape) * scale).astype(np.float32)


@pytest.mark.parametrize("shape", [(6, 5), (3, 2 * BLOCK, 4), (2, BLOCK + 3, 4)])
def test_int8_is_within_half_a_step_of_every_block(shape: tuple[int, ...]) -> None:
    value = normal(*shape)
    value[..., 2] = 0
    value[..., 0, 1] = 1000  # only its own block becomes coarse
    arrays = stored("x", value, "int8")
    assert [array.dtype for array in arrays.values()] == [np.int8, ml_dtypes.bfloat16]
    got = restored("x", arrays)
    assert got.dtype == np.float32 and (got[..., 2] == 0).all()
    for first in range(0, shape[-2], BLOCK):
        block, own = (array[..., first : first + BLOCK, :] for array in (value, got))
        # Scales are bfloat16: up to a 128th larger than they would have to be.
        step = np.abs(block).max(axis=-2, keepdims=True) / 127 * (1 + 1 / 128)
        assert (np.abs(own - block) <= step * (0.5 + 1e-5)).all()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_bfloat16_matrices(dtype: type) -> None:
    value = normal(6, 5).astype(dtype)
    got = restored("x", stored("x", value, "bfloat16"))
    assert got.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(got, value.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("storage", STORAGES)
def test_vectors_and_what_stays_float32_are_kept(storage: Storage) -> None:
    for value in (normal(7), normal(1)[0], normal(7).astype(ml_dtypes.bfloat16)):
        got = restored("x", stored("x", np.asarray(value), storage))
        assert got.dtype == value.dtype
        np.testing.assert_array_equal(got, value)
    assert restored("x", stored("x", normal(7).astype(np.float16), storage)).dtype == np.float32
    router = normal(6, 5)
    np.testing.assert_array_equal(restored("x", stored("x", router, storage, exact=True)), router)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", [(5,), (6, 5), (3, BLOCK + 1, 4)])
def test_shapes(storage: Storage, exact: bool, shape: tuple[int, ...]) -> None:
    arrays = stored("x", normal(*shape), storage, exact=exact)
    found = {name: array.shape for name, array in arrays.items()}
    assert found == stored_shapes("x", shape, storage, exact=exact)
