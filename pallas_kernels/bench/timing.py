"""Timing of device work: many calls in one program, medians of warm runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

CALLS = 16


def seconds_per_call(function: Callable[..., jax.Array], *inputs: tuple[jax.Array, ...]) -> float:
    """Median time of one call. Each program makes one call for every entry of `inputs`, over and
    over to at least `CALLS` calls, each on its own arguments so that nothing stays in a cache
    that would not in use."""

    def chained(inputs: tuple[tuple[jax.Array, ...], ...]) -> list[jax.Array]:
        return [function(*inputs[call % len(inputs)]) for call in range(CALLS)]

    # Equal calls would be merged, so every call gets arguments of its own.
    assert len(inputs) == CALLS
    return seconds(chained, inputs) / CALLS


def seconds(function: Callable[..., Any], *arguments: Any) -> float:
    """Median time of `function` in a program, dispatched four times back to back."""
    program = jax.jit(function)
    jax.block_until_ready(program(*arguments))
    times = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(4):
            result = program(*arguments)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / 4)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a copy of 2 GiB."""
    array = jax.random.bits(jax.random.key(0), (1 << 29,), jnp.uint32)
    return 2 * array.nbytes / seconds(lambda x: x ^ 1, array)


def matmul_rate() -> float:
    """FLOP/s of a bfloat16 product of random square matrices of 8192 rows."""
    size = 8192
    left, right = jax.random.normal(jax.random.key(0), (2, size, size), jnp.bfloat16)
    return 2 * size**3 / seconds(jnp.dot, left, right)
