"""Timing of device work: many calls in one program, medians of warm runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import jax

CALLS = 16


def seconds_per_call(function: Callable[..., jax.Array], *inputs: tuple[jax.Array, ...]) -> float:
    """Median time of one call. Each program makes one call for every entry of `inputs`, over and
    over to at least `CALLS` calls, each on its own arguments so that nothing stays in a cache
    that would not in use."""

    def chained(inputs: tuple[tuple[jax.Array, ...], ...]) -> list[jax.Array]:
        return [function(*inputs[call % len(inputs)]) for call in range(CALLS)]

    # Equal calls would be merged, so every call gets arguments of its own.
    assert len(inputs) == CALLS
    program = jax.jit(chained)
    jax.block_until_ready(program(inputs))
    times = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(4):
            result = program(inputs)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / (4 * CALLS))
    return statistics.median(times)
