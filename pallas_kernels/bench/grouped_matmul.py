"""Products of sorted rows with the matrices of their groups, in bfloat16: implementations against
each other and `jax.lax.ragged_dot`.

Rows are those of a decode step and of a prefill chunk with 6 of E experts each, chosen uniformly
and anew for every call. Calls go up and down in turns, [E, K, N] and then [E, N, K], as the two
products of an expert do; the time is that of one of the two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.measure import Variant, calls_for
from pallas_kernels.grouped_matmul import grouped_matmul

TOP_K = 6
_MATRICES_BYTES = 5e8
# Implementations that take a multiple of the kernel's time for many rows make fewer calls then.
_MANY_ROWS, _SLOW_CALLS = 1000, 4
_LARGEST_RAGGED_DOT = 2**32  # rows in every group


@dataclass(frozen=True)
class GroupedCase:
    num_groups: int
    inner: int
    columns: int
    num_tokens: int

    @property
    def name(self) -> str:
        return f"{self.num_groups} x {self.inner} x {self.columns} T={self.num_tokens}"

    @property
    def num_rows(self) -> int:
        return TOP_K * self.num_tokens

    @property
    def bytes_moved(self) -> float:
        """The matrices of the groups that some row belongs to (on average), and the rows."""
        touched = self.num_groups * (1 - (1 - 1 / self.num_groups) ** self.num_rows)
        matrices = touched * self.inner * self.columns
        return 2 * (matrices + self.num_rows * (self.inner + self.columns))

    @property
    def flops(self) -> float:
        return 2 * self.num_rows * self.inner * self.columns

    def arguments(self) -> tuple[Any, ...]:
        """Rows; pairs of matrices; sizes of the groups for several calls."""
        rng = np.random.default_rng(0)
        shape = (self.num_groups, self.inner, self.columns)
        pair_bytes = 4 * self.num_groups * self.inner * self.columns
        num_pairs = min(self._calls // 2, max(1, int(_MATRICES_BYTES / pair_bytes)))
        keys = [jax.random.key(seed) for seed in range(num_pairs)]

        def matrices(key: jax.Array) -> tuple[jax.Array, jax.Array]:
            up, down = jax.random.split(key)
            other = (self.num_groups, self.columns, self.inner)
            # Products of products stay about as large as the rows.
            return (
                jax.random.normal(up, shape, jnp.bfloat16) * self.inner**-0.5,
                jax.random.normal(down, other, jnp.bfloat16) * self.columns**-0.5,
            )

        uniform = np.full(self.num_groups, 1 / self.num_groups)
        sizes = [rng.multinomial(self.num_rows, uniform) for _ in range(self._calls)]
        return (
            jnp.asarray(rng.standard_normal((self.num_rows, self.inner)), jnp.bfloat16),
            tuple(matrices(key) for key in keys),
            tuple(jnp.asarray(one, jnp.int32) for one in sizes),
        )

    @property
    def _calls(self) -> int:
        return calls_for(self.bytes_moved)

    def variants(self) -> dict[str, Variant]:
        functions: dict[str, Callable[..., jax.Array]] = {
            name: functools.partial(grouped_matmul, implementation=name)
            for name in ("triton", "xla")
        }
        if self.num_groups * self.num_rows * self.inner <= _LARGEST_RAGGED_DOT:
            functions["ragged_dot"] = jax.lax.ragged_dot
        others = self._calls if self.num_rows < _MANY_ROWS else _SLOW_CALLS
        return {
            name: Variant(self._call(function), self._calls if name == "triton" else others)
            for name, function in functions.items()
        }

    def _call(self, function: Callable[..., jax.Array]) -> Any:
        multiply = jax.jit(function)

        def call(number: int, rows: jax.Array, matrices: Any, sizes: Any) -> Any:
            pair = matrices[number // 2 % len(matrices)]
            out = multiply(rows, pair[number % 2], sizes[number % len(sizes)])
            return out, out

        return call

    def error(self, variant: str, arguments: tuple[Any, ...], result: Any, passed: Any) -> float:
        """Relative to the norm of the first call's product in float32."""
        rows, ((matrices, _), *_), (sizes, *_) = arguments
        wide = np.asarray(rows, np.float32)
        groups = np.repeat(np.arange(self.num_groups), np.asarray(sizes))
        wanted = np.empty((self.num_rows, self.columns), np.float32)
        for group in np.unique(groups):
            mine = groups == group
            wanted[mine] = wide[mine] @ np.asarray(matrices[group], np.float32)
        found = np.asarray(result, np.float32)
        return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


# A scaled-down Inkling, and a quarter of Inkling-Small's experts.
SHAPES = [(64, 1024, 512), (64, 4096, 2048)]
CASES = [
    GroupedCase(*shape, num_tokens) for shape in SHAPES for num_tokens in (1, 9, 64, 576, 4096)
]
