"""Writing rows into pages: both implementations against NumPy ("triton" is interpreted on a CPU),
untouched places, lowering for CUDA, and the kernels on a GPU.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.aot import on_h200
from pallas_kernels.kv_write import Rotation, kv_write, rotate_and_write

IMPLEMENTATIONS = ("xla", "triton")
LAYERS, PAGES, SIZE = 3, 7, 4


def slots_of(num_rows: int, rng: np.random.Generator) -> np.ndarray:
    """Distinct places, a third of them none."""
    slots = rng.permutation(PAGES * SIZE)[:num_rows].astype(np.int32)
    slots[rng.random(num_rows) < 1 / 3] = -1
    return slots


def written(pages: np.ndarray, rows: np.ndarray, layer: int, slots: np.ndarray) -> np.ndarray:
    pages = pages.copy()
    for slot, row in zip(slots, rows, strict=True):
        if slot >= 0:
            pages[layer, slot // SIZE, slot % SIZE] = row
    return pages


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_rows", [1, 16, 23])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_streams_of_any_shape(num_rows: int, dtype: str, implementation: str) -> None:
    rng = np.random.default_rng(num_rows)
    shapes = {"k": (3, 20), "v": (3, 8), "attention": (700,), "kept": (5,)}
    pages = {
        name: rng.standard_normal((LAYERS, PAGES, SIZE, *shape)).astype(jnp.dtype(dtype))
        for name, shape in shapes.items()
    }
    rows = {
        name: rng.standard_normal((num_rows, *shape)).astype(np.float32)
        for name, shape in shapes.items()
        if name != "kept"
    }
    slots = slots_of(num_rows, rng)
    function = jax.jit(functools.partial(kv_write, implementation=implementation))
    found = function(pages, rows, np.int32(1), slots)
    for name, array in pages.items():
        want = array
        if name in rows:
            want = written(array, rows[name].astype(array.dtype), 1, slots)
        assert np.asarray(found[name]).tobytes() == want.tobytes(), name


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "group of one": {"group": 1},
    "five queries": {"group": 5, "heads": 1},
    "norms": {"norms": True},
    "norms of one plus scale": {"norms": True, "rotation": Rotation(1e-5, one_plus=True)},
    "part of the entries": {"half": 5},
    "smaller values": {"value_dim": 8, "rotation": Rotation(value_scale=0.5)},
    "odd sizes": {"dim": 40, "half": 20, "value_dim": 40, "norms": True},
}


def make(
    num_tokens: int,
    *,
    group: int = 3,
    heads: int = 2,
    dim: int = 16,
    half: int = 8,
    value_dim: int = 16,
    norms: bool = False,
    rotation: Rotation | None = None,
    dtype: str = "float32",
    seed: int = 0,
) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
    rng = np.random.default_rng(seed)

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(jnp.dtype(dtype))

    angle = rng.uniform(0, 100, (num_tokens, half))
    arguments = (
        random(num_tokens, heads, (group + 1) * dim + value_dim),
        random(LAYERS, PAGES, SIZE, heads, dim),
        random(LAYERS, PAGES, SIZE, heads, value_dim),
        np.int32(2),
        slots_of(num_tokens, rng),
        np.cos(angle).astype(np.float32),
        np.sin(angle).astype(np.float32),
    )
    options: dict[str, Any] = {"rotation": rotation or Rotation()}
    if norms:
        options |= {"q_scale": random(dim), "k_scale": random(dim)}
    return arguments, options


def by_hand(
    arguments: tuple[np.ndarray, ...], options: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token by token and head by head, in float64."""
    qkv, k_pages, v_pages, layer, slots, cos, sin = arguments
    rotation: Rotation = options["rotation"]
    dim, half = k_pages.shape[4], cos.shape[1]
    group = (qkv.shape[2] - v_pages.shape[4]) // dim - 1
    q = np.zeros((len(qkv), qkv.shape[1] * group, dim))
    k_pages, v_pages = k_pages.astype(np.float64), v_pages.astype(np.float64)
    for token, slot in enumerate(slots):
        for head in range(qkv.shape[1]):
            columns = qkv[token, head].astype(np.float64)
            for lane in range(group + 1):
                x = columns[lane * dim : (lane + 1) * dim]
                scale = options.get("q_scale" if lane < group else "k_scale")
                if scale is not None:
                    scale = scale.astype(np.float64) + rotation.one_plus
                    x = x / np.sqrt(np.mean(x * x) + rotation.eps) * scale
                first, second = x[:half], x[half : 2 * half]
                c, s = np.float64(cos[token]), np.float64(sin[token])
                x = np.concatenate([first * c - second * s, second * c + first * s, x[2 * half :]])
                if lane < group:
                    q[token, head * group + lane] = x
                elif slot >= 0:
                    k_pages[layer, slot // SIZE, slot % SIZE, head] = x
            if slot >= 0:
                value = columns[(group + 1) * dim :] * rotation.value_scale
                v_pages[layer, slot // SIZE, slot % SIZE, head] = value
    return q, k_pages, v_pages


def compare(num_tokens: int, implementation: str, dtype: str, seed: int, **case: Any) -> None:
    arguments, options = make(num_tokens, dtype=dtype, seed=seed, **case)
    statics = {"implementation": implementation, "rotation": options.pop("rotation")}
    function = jax.jit(functools.partial(rotate_and_write, **statics))
    found = function(*arguments, **options)
    wanted = by_hand(arguments, options | statics)
    tolerance = {"float32": 1e-6, "bfloat16": 1e-2}[dtype]
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == arguments[0].dtype
        error = np.linalg.norm(np.asarray(got, np.float64) - want)
        assert error <= tolerance * np.linalg.norm(want)
    untouched = np.ones((PAGES * SIZE,), bool)
    untouched[arguments[4][arguments[4] >= 0]] = False
    for got, old in zip(found[1:], arguments[1:3], strict=True):
        got, old = (np.asarray(x).reshape(LAYERS, PAGES * SIZE, -1) for x in (got, old))
        assert (got[:2] == old[:2]).all()
        assert (got[2][untouched] == old[2][untouched]).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES)
def test_rotation(case: str, implementation: str) -> None:
    compare(13, implementation, "float32", 1, **CASES[case])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_tokens", [1, 28])
def test_rotation_in_bfloat16(num_tokens: int, implementation: str) -> None:
    compare(num_tokens, implementation, "bfloat16", 2, norms=True)


def test_wrong_arguments() -> None:
    made, options = make(3)
    arguments = tuple(jnp.asarray(array) for array in made)
    with pytest.raises(ValueError, match="one of triton, xla, differentiable, got 'cuda'"):
        rotate_and_write(*arguments, implementation="cuda", **options)
    with pytest.raises(ValueError, match="q_scale and k_scale go together"):
        rotate_and_write(*arguments, q_scale=jnp.ones(16), **options)
    with pytest.raises(ValueError, match="do not fit keys of 16"):
        rotate_and_write(arguments[0][..., 1:], *arguments[1:], **options)
    with pytest.raises(ValueError, match=r"rows 'k' .* do not fit pages"):
        kv_write({"k": arguments[1]}, {"k": arguments[0]}, 0, arguments[4])
    with pytest.raises(ValueError, match=r"rows 'v' .* do not fit pages missing"):
        kv_write({"k": arguments[1]}, {"v": arguments[0]}, 0, arguments[4])


@pytest.mark.parametrize("case", CASES)
def test_lowers_for_cuda(case: str) -> None:
    arguments, options = make(9, dtype="bfloat16", **CASES[case])
    rotation = options.pop("rotation")
    with on_h200():
        function = functools.partial(rotate_and_write, rotation=rotation)
        traced = jax.jit(function).trace(*arguments, **options)
        assert "triton" in traced.lower(lowering_platforms=("cuda",)).as_text()
        streams = {"k": arguments[1]}, {"k": np.zeros((9, *arguments[1].shape[3:]), np.float32)}
        traced = jax.jit(kv_write).trace(*streams, 1, arguments[4])
        assert "triton" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case: str, dtype: str) -> None:
    """Fresh random inputs."""
    compare(27, "triton", dtype, int(np.random.default_rng().integers(2**31)), **CASES[case])
