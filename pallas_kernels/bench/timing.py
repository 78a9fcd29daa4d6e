"""Timing of device work: medians of warm runs, and what a copy and a product reach."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

# Dispatching a program costs about 0.1 ms: several follow each other in a run.
_BACK_TO_BACK = 4
_MOST_RUNS, _FEWEST_RUNS, _ENOUGH_SECONDS = 20, 5, 1.0


@dataclass(frozen=True)
class Rates:
    """Bytes (read and written) and floating-point operations per second."""

    bytes_per_second: float
    flops_per_second: float

    def __str__(self) -> str:
        copy, product = self.bytes_per_second / 1e9, self.flops_per_second / 1e12
        return f"copy {copy:,.0f} GB/s, product {product:,.1f} TFLOP/s"


def median_seconds(run: Callable[[], Any]) -> float:
    """The median time of `run`, which dispatches a compiled program and returns its outputs."""
    jax.block_until_ready(run())
    times: list[float] = []
    while len(times) < _MOST_RUNS:
        if len(times) >= _FEWEST_RUNS and sum(times) * _BACK_TO_BACK > _ENOUGH_SECONDS:
            break
        start = time.perf_counter()
        for _ in range(_BACK_TO_BACK):
            result = run()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / _BACK_TO_BACK)
    return statistics.median(times)


def measure_rates(dtype: DTypeLike = jnp.bfloat16) -> Rates:
    """What the default device reaches: copying 2 GiB, and a product of square matrices of 8192 rows
    in `dtype` (less on a CPU). Random numbers: on equal ones an H200 is faster than in use."""
    small = jax.default_backend() == "cpu"
    size = 768 if small else 8192
    bits = jax.random.bits(jax.random.key(0), (1 << (23 if small else 29),), jnp.uint32)
    matrix = jax.random.normal(jax.random.key(1), (size, size), dtype)
    return Rates(
        2 * bits.nbytes / _seconds(lambda values: values ^ 1, bits),
        2 * size**3 / _seconds(lambda values: values @ values, matrix),
    )


def _seconds(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    """Median time of `function` of x. It writes over an old result: new memory would cost time of
    its own."""
    program = jax.jit(lambda x, _: function(x), donate_argnums=1, keep_unused=True)
    y = jnp.copy(x)

    def run() -> jax.Array:
        nonlocal y
        y = program(x, y)
        return y

    return median_seconds(run)
