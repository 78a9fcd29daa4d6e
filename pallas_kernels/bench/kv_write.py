"""New rows into the pages of a cache, in bfloat16: alone, and after a rotation of queries and keys.

Every call writes to a layer of its own, at randomly permuted places, into the pages that the call
before returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.measure import Variant, calls_for
from pallas_kernels.kv_write import Rotation, kv_write, rotate_and_write

LAYERS, PAGES, PAGE = 16, 1024, 16


@dataclass(frozen=True)
class WriteCase:
    """`num_tokens` rows of a layer with these heads."""

    model: str
    operation: Literal["kv_write", "rotate_and_write"]
    num_tokens: int
    num_heads: int
    num_kv_heads: int
    dim: int

    @property
    def name(self) -> str:
        return f"{self.operation} {self.model} T={self.num_tokens}"

    @property
    def bytes_moved(self) -> float:
        """What is read (angles are float32) and written."""
        heads = 2 * self.num_kv_heads
        angles = 0
        if self.operation == "rotate_and_write":
            heads += self.num_heads
            angles = 4 * self.dim  # a sine and a cosine of half as many
        return self.num_tokens * (2 * 2 * heads * self.dim + angles)

    @property
    def flops(self) -> float:
        """Those of the rotation: too few to matter."""
        rotated = 0
        if self.operation == "rotate_and_write":
            rotated = self.num_heads + self.num_kv_heads
        return 3 * self.num_tokens * rotated * self.dim

    def arguments(self) -> tuple[Any, ...]:
        """Pages of keys and of values; rows, places, cosines and sines."""
        rng = np.random.default_rng(0)
        shape = (LAYERS, PAGES, PAGE, self.num_kv_heads, self.dim)
        pages = tuple(jnp.zeros(shape, jnp.bfloat16) for _ in range(2))
        columns = (self.num_heads // self.num_kv_heads + 2) * self.dim
        rows = (self.num_tokens, self.num_kv_heads, columns)
        slots = rng.choice(PAGES * PAGE, self.num_tokens, replace=False)
        angle = rng.uniform(0, 100, (self.num_tokens, self.dim // 2))
        return (
            pages,
            jax.random.normal(jax.random.key(0), rows, jnp.bfloat16),
            jnp.asarray(slots, jnp.int32),
            jnp.asarray(np.cos(angle), jnp.float32),
            jnp.asarray(np.sin(angle), jnp.float32),
        )

    def variants(self) -> dict[str, Variant]:
        return {name: Variant(self._call(name), self._calls) for name in ("triton", "xla")}

    @property
    def _calls(self) -> int:
        return calls_for(self.bytes_moved)

    def _call(self, implementation: str) -> Any:
        @jax.jit
        def write(
            pages: Any, qkv: jax.Array, layer: Any, slots: jax.Array, cos: Any, sin: Any
        ) -> Any:
            k_pages, v_pages = pages
            if self.operation == "rotate_and_write":
                q, k_pages, v_pages = rotate_and_write(
                    qkv,
                    k_pages,
                    v_pages,
                    layer,
                    slots,
                    cos,
                    sin,
                    rotation=Rotation(),
                    implementation=implementation,
                )
                return (k_pages, v_pages), q
            streams = {"k": k_pages, "v": v_pages}
            k, v = qkv[..., : self.dim], qkv[..., self.dim : 2 * self.dim]
            found = kv_write(streams, {"k": k, "v": v}, layer, slots, implementation=implementation)
            return (found["k"], found["v"]), slots

        def call(number: int, pages: Any, qkv: jax.Array, *rest: jax.Array) -> Any:
            return write(pages, qkv, np.int32(number % LAYERS), *rest)

        return call

    def error(self, variant: str, arguments: tuple[Any, ...], result: Any, passed: Any) -> float:
        """Relative to the norm of the rows, rotated in float64: queries, and what lies in the pages
        of the last layer written."""
        _, qkv, slots, cos, sin = (np.asarray(a) for a in (0, *arguments[1:]))
        wide = qkv.astype(np.float64)
        layer = (self._calls - 1) % LAYERS
        found = [
            np.asarray(pages[layer]).reshape(-1, self.num_kv_heads, self.dim)[slots]
            for pages in passed
        ]
        if self.operation == "kv_write":
            wanted = [wide[..., : self.dim], wide[..., self.dim : 2 * self.dim]]
        else:
            *queries, k, v = np.split(wide, qkv.shape[2] // self.dim, axis=2)

            def rotated(x: np.ndarray) -> np.ndarray:
                a, b = np.split(x, 2, axis=2)
                c, s = cos[:, None], sin[:, None]
                return np.concatenate([a * c - b * s, b * c + a * s], axis=2)

            found.append(np.asarray(result))
            q = np.stack([rotated(x) for x in queries], axis=2)
            wanted = [rotated(k), v, q.reshape(result.shape)]
        off = sum(
            np.sum((f.astype(np.float64) - w) ** 2) for f, w in zip(found, wanted, strict=True)
        )
        return float(np.sqrt(off / sum(np.sum(w**2) for w in wanted)))


MODELS = {"SmolLM2": (9, 3, 64), "Llama-8B": (32, 8, 128)}
CASES = [
    WriteCase(model, operation, num_tokens, *heads)
    for model, heads in MODELS.items()
    for operation in ("rotate_and_write", "kv_write")
    for num_tokens in (1, 64, 576, 4096)
]
