"""Ragged paged attention on a GPU: decode windows, mixed batches and prefill, in bfloat16.

Every program makes `CALLS` calls, each on the output of the one before and on a layer of its own,
as the layers of a model do. Keys lie on randomly permuted pages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.timing import CALLS, seconds
from pallas_kernels.ragged_paged_attention import ragged_paged_attention, triton
from pallas_kernels.ragged_paged_attention.config import Config


@dataclass(frozen=True)
class Case:
    """`requests` are (query rows, keys) of every request."""

    name: str
    requests: tuple[tuple[int, int], ...]
    num_heads: int
    num_kv_heads: int
    dim: int
    page: int = 16
    window: int | None = None

    @property
    def bytes_moved(self) -> int:
        """Keys and values that some row sees, once; queries and outputs."""
        keys = sum(keys - self._oldest(rows, keys) for rows, keys in self.requests)
        rows = sum(rows for rows, _ in self.requests)
        return 4 * self.dim * (keys * self.num_kv_heads + rows * self.num_heads)

    @property
    def flops(self) -> int:
        """Both products, for the keys that each row sees (half of a causal square)."""
        seen = 0
        for rows, keys in self.requests:
            last = np.arange(keys - rows, keys) + 1
            seen += int(np.minimum(last, self.window or keys).sum())
        return 4 * self.dim * self.num_heads * seen

    def _oldest(self, rows: int, keys: int) -> int:
        return 0 if self.window is None else max(keys - rows - self.window + 1, 0)


def _decode(name: str, batch: int, width: int, keys: int, *heads: int, **options: Any) -> Case:
    return Case(name, ((width, keys),) * batch, *heads, **options)


LLAMA, SMOL = (32, 8, 128), (9, 3, 64)
CASES = {
    case.name: case
    for case in (
        _decode("window B=128 W=5 ctx 2048", 128, 5, 2048, *LLAMA),
        _decode("window B=128 W=5 ctx 2048 page 64", 128, 5, 2048, *LLAMA, page=64),
        _decode("window B=16 W=5 ctx 1024", 16, 5, 1024, *LLAMA),
        _decode("window B=1 W=9 ctx 32768", 1, 9, 32768, *LLAMA),
        _decode("window SmolLM2 B=8 W=9 ctx 512", 8, 9, 512, *SMOL),
        _decode("window SmolLM2 B=64 W=9 ctx 512", 64, 9, 512, *SMOL),
        _decode("decode B=1 ctx 1024", 1, 1, 1024, *LLAMA),
        _decode("decode B=64 ctx 1024", 64, 1, 1024, *LLAMA),
        _decode("decode SmolLM2 B=1 ctx 256", 1, 1, 256, *SMOL),
        _decode("decode SmolLM2 B=256 ctx 256", 256, 1, 256, *SMOL),
        _decode("decode B=64 ctx 8192 window 1024", 64, 1, 8192, *LLAMA, window=1024),
        Case("mixed 64 x W=9 + 512, ctx 1024", ((9, 1024),) * 64 + ((512, 512),), *LLAMA),
        Case("prefill 4096", ((4096, 4096),), *LLAMA),
        Case("prefill 8192", ((8192, 8192),), *LLAMA),
        Case("prefill 16384", ((16384, 16384),), *LLAMA),
        Case("chunk of 512 at 8192", ((512, 8192),), *LLAMA),
    )
}


def arguments_of(case: Case) -> tuple[jax.Array, ...]:
    """Random queries, keys and values, a permuted page table, and the ragged lengths."""
    rng = np.random.default_rng(0)
    width = -(-max(keys for _, keys in case.requests) // case.page)
    num_pages = 1 + width * len(case.requests)
    table = 1 + rng.permutation(num_pages - 1).reshape(len(case.requests), width)
    layers = min(CALLS, max(2, int(8e9 / case.bytes_moved)))
    shape = (layers, num_pages, case.page, case.num_kv_heads, case.dim)
    rows = [rows for rows, _ in case.requests]
    shapes = {0: shape, 1: shape, 2: (sum(rows), case.num_heads, case.dim)}
    k_pages, v_pages, q = (
        jax.jit(functools.partial(jax.random.normal, shape=shape, dtype=jnp.bfloat16))(
            jax.random.key(seed)
        )
        for seed, shape in shapes.items()
    )
    return (
        q,
        k_pages,
        v_pages,
        jnp.asarray(table, jnp.int32),
        jnp.asarray(np.cumsum([0, *rows]), jnp.int32),
        jnp.asarray([keys for _, keys in case.requests], jnp.int32),
    )


def chained(
    case: Case, implementation: str, config: Config | None = None
) -> tuple[Callable[..., jax.Array], int]:
    """A function of `arguments_of(case)` that makes several calls, and how many."""
    function = functools.partial(ragged_paged_attention, implementation=implementation)
    if config is not None:
        function = functools.partial(
            triton.ragged_paged_attention,
            config=config,
            softcap=None,
            sinks=None,
            rel_rows=None,
            rel_table=None,
            value_dim=None,
        )
    calls = CALLS if implementation == "triton" else 2

    def several(q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array) -> jax.Array:
        for call in range(calls):
            q = function(
                q, k, v, call % k.shape[0], *rest, scale=case.dim**-0.5, window=case.window
            )
        return q

    return several, calls


def measure(case: Case, implementation: str) -> dict[str, Any]:
    """Microseconds per call, GB/s and TFLOP/s."""
    function, calls = chained(case, implementation)
    taken = seconds(function, *arguments_of(case)) / calls
    return {
        "case": case.name,
        "implementation": implementation,
        "us": round(1e6 * taken, 2),
        "GB/s": round(case.bytes_moved / taken / 1e9),
        "TFLOP/s": round(case.flops / taken / 1e12, 1),
    }
