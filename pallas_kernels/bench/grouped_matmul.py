"""`python -m pallas_kernels.bench.grouped_matmul`: implementations against each other and
`jax.lax.ragged_dot`, checked against float32, as JSON lines.

Rows are those of a decode step and of a prefill chunk with 6 of E experts each, chosen uniformly.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.timing import CALLS, seconds_per_call
from pallas_kernels.grouped_matmul import grouped_matmul

TOP_K = 6
# (E, K, N): a scaled-down Inkling, and a quarter of Inkling-Small's experts.
SHAPES = [(64, 1024, 512), (64, 4096, 2048)]
TOKENS = [1, 9, 64, 576, 4096]


def measure(shape: tuple[int, int, int], tokens: int, seed: int) -> dict[str, Any]:
    """Microseconds of every implementation, the bytes' floor and errors for one size."""
    num_groups, inner, columns = shape
    generator = np.random.default_rng(seed)
    num_rows = tokens * TOP_K
    rows = jnp.asarray(generator.standard_normal((num_rows, inner)), jnp.bfloat16)
    key = jax.random.key(seed)
    matrices = [
        jax.random.normal(jax.random.fold_in(key, index), shape, jnp.bfloat16) for index in range(2)
    ]
    sizes = [
        jnp.asarray(generator.multinomial(num_rows, np.full(num_groups, 1 / num_groups)), jnp.int32)
        for _ in range(CALLS)
    ]
    calls = tuple((rows, matrices[index % 2], sizes[index]) for index in range(CALLS))
    wanted = [np.repeat(np.arange(num_groups), np.asarray(size)) for size in sizes]
    touched = np.mean([len(np.unique(groups)) for groups in wanted])
    functions: dict[str, Callable[..., jax.Array]] = {
        name: lambda *call, name=name: grouped_matmul(*call, implementation=name)
        for name in ("triton", "xla")
    }
    functions["ragged_dot"] = jax.lax.ragged_dot
    found: dict[str, Any] = {"groups": num_groups, "K": inner, "N": columns, "tokens": tokens}
    exact = _float32(np.asarray(rows), matrices[0], wanted[0])
    for name, function in functions.items():
        if name == "ragged_dot" and num_groups * num_rows * inner > 2**32:
            continue
        y = np.asarray(function(*calls[0]), np.float32)
        found[f"{name}_error"] = float(np.linalg.norm(y - exact) / np.linalg.norm(exact))
        found[f"{name}_us"] = round(1e6 * seconds_per_call(function, *calls), 1)
    num_bytes = 2 * (touched * inner * columns + num_rows * (inner + columns))
    found["floor_us"] = round(
        1e6 * max(num_bytes / 4.3e12, 2 * num_rows * inner * columns / 790e12), 1
    )
    return found


def _float32(rows: np.ndarray, matrices: jax.Array, groups: np.ndarray) -> np.ndarray:
    wide = rows.astype(np.float32)
    y = np.empty((len(rows), matrices.shape[2]), np.float32)
    for group in np.unique(groups):
        mine = groups == group
        y[mine] = wide[mine] @ np.asarray(matrices[group], np.float32)
    return y


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(json.dumps({"device": jax.devices()[0].device_kind, "jax": jax.__version__}))
    for shape in SHAPES:
        for tokens in TOKENS:
            print(json.dumps(measure(shape, tokens, arguments.seed)), flush=True)


if __name__ == "__main__":
    main()
