"""Timing of device work: medians of warm runs, and what a copy and a product reach."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

# Dispatching a program costs about 0.1 ms: several follow each other in a run.
_BACK_TO_BACK = 4
_MOST_RUNS, _FEWEST_RUNS, _ENOUGH_SECONDS = 20, 5, 1.0


@dataclass(frozen=True)
class Rates:
    """Bytes (read and written) and floating-point operations per second."""

    bytes_per_second: float
    flops_per_second: float


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


def seconds(function: Callable[..., Any], *arguments: Any) -> float:
    """Median time of `function` in a program of its own."""
    program = jax.jit(function)
    return median_seconds(lambda: program(*arguments))


def measure_rates() -> Rates:
    return Rates(copy_bandwidth(), matmul_rate())


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a copy of 2 GiB."""
    array = jax.random.bits(jax.random.key(0), (1 << 29,), jnp.uint32)
    return 2 * array.nbytes / seconds(lambda x: x ^ 1, array)


def matmul_rate() -> float:
    """FLOP/s of a bfloat16 product of random square matrices of 8192 rows."""
    size = 8192
    left, right = jax.random.normal(jax.random.key(0), (2, size, size), jnp.bfloat16)
    return 2 * size**3 / seconds(jnp.dot, left, right)
