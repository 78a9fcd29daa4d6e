"""Ragged paged attention on a GPU: decodes, windows of drafts, mixed batches and prefill, in
bfloat16.

Every call works on a layer of its own, as the layers of a model do, with the output of the call
before as its queries. Keys lie on randomly permuted pages.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._compat import device_kind
from pallas_kernels.bench.measure import Variant, calls_for
from pallas_kernels.ragged_paged_attention import ragged_paged_attention, triton
from pallas_kernels.ragged_paged_attention.config import Call, Config, Key, choose_config

_CHECKED_ROWS = 16


@dataclass(frozen=True)
class AttentionCase:
    """`requests` are (query rows, keys) of every request; with `tunes`, other configurations are
    measured beside the one that is used."""

    name: str
    requests: tuple[tuple[int, int], ...]
    num_heads: int
    num_kv_heads: int
    dim: int
    page: int = 16
    window: int | None = None
    tunes: bool = False

    @property
    def num_rows(self) -> int:
        return sum(rows for rows, _ in self.requests)

    @property
    def bytes_moved(self) -> float:
        """Keys and values that some row sees, once; queries and outputs."""
        keys = sum(keys - self._oldest(rows, keys) for rows, keys in self.requests)
        return 4 * self.dim * (keys * self.num_kv_heads + self.num_rows * self.num_heads)

    @property
    def flops(self) -> float:
        """Both products, for the keys that each row sees (half of a causal square)."""
        seen = 0
        for rows, keys in self.requests:
            last = np.arange(keys - rows, keys) + 1
            seen += int(np.minimum(last, self.window or keys).sum())
        return 4 * self.dim * self.num_heads * seen

    def _oldest(self, rows: int, keys: int) -> int:
        return 0 if self.window is None else max(keys - rows - self.window + 1, 0)

    @property
    def _table_width(self) -> int:
        return -(-max(keys for _, keys in self.requests) // self.page)

    @property
    def _layers(self) -> int:
        return min(calls_for(self.bytes_moved), max(2, int(8e9 / self.bytes_moved)))

    def arguments(self) -> tuple[jax.Array, ...]:
        """Random queries, keys and values, a permuted page table, and the ragged lengths."""
        rng = np.random.default_rng(0)
        num_pages = 1 + self._table_width * len(self.requests)
        table = 1 + rng.permutation(num_pages - 1).reshape(len(self.requests), self._table_width)
        pages = (self._layers, num_pages, self.page, self.num_kv_heads, self.dim)
        q, k_pages, v_pages = (
            jax.jit(functools.partial(jax.random.normal, shape=shape, dtype=jnp.bfloat16))(
                jax.random.key(seed)
            )
            for seed, shape in enumerate(((self.num_rows, self.num_heads, self.dim), pages, pages))
        )
        return (
            q,
            k_pages,
            v_pages,
            jnp.asarray(table, jnp.int32),
            jnp.asarray(np.cumsum([0, *(rows for rows, _ in self.requests)]), jnp.int32),
            jnp.asarray([keys for _, keys in self.requests], jnp.int32),
        )

    def variants(self) -> dict[str, Variant]:
        """The kernel as it is used, and with other configurations, named as they are written."""
        used = functools.partial(ragged_paged_attention, implementation="triton")
        functions: dict[str, Callable[..., jax.Array]] = {"triton": used}
        for config in alternatives(self.config) if self.tunes else ():
            functions[repr(config)] = functools.partial(
                triton.ragged_paged_attention,
                config=config,
                softcap=None,
                sinks=None,
                rel_rows=None,
                rel_table=None,
                value_dim=None,
            )
        return {name: self._variant(function) for name, function in functions.items()}

    def _variant(self, function: Callable[..., jax.Array]) -> Variant:
        attend = jax.jit(functools.partial(function, scale=self.dim**-0.5, window=self.window))

        def call(number: int, q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array) -> Any:
            out = attend(q, k, v, np.int32(number % self._layers), *rest)
            return out, out

        return Variant(call, calls_for(self.bytes_moved))

    def error(
        self, variant: str, arguments: tuple[jax.Array, ...], result: jax.Array, passed: Any
    ) -> float:
        """Relative to the norm of some rows, recomputed in float64."""
        q, k_pages, v_pages, table, _, _ = arguments
        rng = np.random.default_rng(0)
        owner = np.repeat(np.arange(len(self.requests)), [rows for rows, _ in self.requests])
        place = np.concatenate([np.arange(rows) for rows, _ in self.requests])
        picked = rng.choice(self.num_rows, min(self.num_rows, _CHECKED_ROWS), replace=False)
        group = self.num_heads // self.num_kv_heads
        wanted = np.empty((len(picked), self.num_kv_heads, group, self.dim))
        for index, row in enumerate(picked):
            rows, keys = self.requests[owner[row]]
            last = keys - rows + place[row]
            first = 0 if self.window is None else max(last - self.window + 1, 0)
            k, v = (
                np.asarray(pages[0, table[owner[row]]], np.float32)
                .reshape(-1, self.num_kv_heads, self.dim)[first : last + 1]
                .transpose(1, 0, 2)
                .astype(np.float64)
                for pages in (k_pages, v_pages)
            )
            heads = np.asarray(q[row], np.float64).reshape(self.num_kv_heads, group, self.dim)
            scores = heads @ k.swapaxes(1, 2) * self.dim**-0.5
            weights = np.exp(scores - scores.max(axis=2, keepdims=True))
            wanted[index] = weights / weights.sum(axis=2, keepdims=True) @ v
        found = np.asarray(result[picked], np.float64).reshape(wanted.shape)
        return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))

    @property
    def call(self) -> Call:
        return Call(
            num_tokens=self.num_rows,
            num_requests=len(self.requests),
            num_kv_heads=self.num_kv_heads,
            group=self.num_heads // self.num_kv_heads,
            key_dim=self.dim,
            itemsize=2,
            window=self.window,
            positions=self._table_width * self.page,
        )

    @property
    def config(self) -> Config:
        """What the kernel uses."""
        return choose_config(device_kind(), self.call)

    @property
    def key(self) -> Key:
        """What an entry of the table for this case holds for."""
        return self.call.key(device_kind())


def alternatives(config: Config) -> list[Config]:
    """Configurations in which one or two things are otherwise."""
    tiles = [config.block_m // 2, 2 * config.block_m]
    splits = [config.splits // 2, 2 * config.splits]
    changes: list[list[dict[str, Any]]] = [
        [{"block_m": rows} for rows in tiles if 16 <= rows <= 128],
        [{"block_k": keys} for keys in (32, 64, 128, 256)],
        [
            {"splits": parts, "combines_apart": parts > 1 and apart}
            for parts in splits
            for apart in (False, True)
            if 1 <= parts <= 64
        ],
        [{"num_warps": w, "num_stages": s} for w, s in ((4, 2), (4, 3), (4, 5), (8, 3), (8, 5))],
        [{"edges_apart": not config.edges_apart}],
    ]
    found = dict.fromkeys(
        dataclasses.replace(config, **first, **second)
        for one, other in itertools.combinations(changes, 2)
        for first, second in itertools.product([{}, *one], [{}, *other])
    )
    found.pop(config, None)
    return list(found)


def tuned(cases: Iterable[AttentionCase]) -> list[AttentionCase]:
    """The same cases with other configurations beside."""
    return [dataclasses.replace(case, tunes=True) for case in cases]


def _decode(
    name: str, batch: int, width: int, keys: int, heads: tuple[int, int, int], **options: Any
) -> AttentionCase:
    return AttentionCase(name, ((width, keys),) * batch, *heads, **options)


LLAMA, SMOL = (32, 8, 128), (9, 3, 64)
CASES = [
    _decode("window B=128 W=5 ctx 2048", 128, 5, 2048, LLAMA),
    _decode("window B=128 W=5 ctx 2048 page 64", 128, 5, 2048, LLAMA, page=64),
    _decode("window B=16 W=5 ctx 1024", 16, 5, 1024, LLAMA),
    _decode("window B=1 W=9 ctx 32768", 1, 9, 32768, LLAMA),
    _decode("window SmolLM2 B=8 W=9 ctx 512", 8, 9, 512, SMOL),
    _decode("window SmolLM2 B=64 W=9 ctx 512", 64, 9, 512, SMOL),
    _decode("decode B=1 ctx 1024", 1, 1, 1024, LLAMA),
    _decode("decode B=64 ctx 1024", 64, 1, 1024, LLAMA),
    _decode("decode SmolLM2 B=1 ctx 256", 1, 1, 256, SMOL),
    _decode("decode SmolLM2 B=256 ctx 256", 256, 1, 256, SMOL),
    _decode("decode B=64 ctx 8192 window 1024", 64, 1, 8192, LLAMA, window=1024),
    AttentionCase("mixed 64 x W=9 + 512, ctx 1024", ((9, 1024),) * 64 + ((512, 512),), *LLAMA),
    AttentionCase("mixed 64 x W=9 + 512 at 8192", ((9, 1024),) * 64 + ((512, 8192),), *LLAMA),
    AttentionCase("mixed SmolLM2 64 x W=9 + 512", ((9, 512),) * 64 + ((512, 512),), *SMOL),
    AttentionCase("mixed SmolLM2 64 x W=9 + 512 at 2560", ((9, 512),) * 64 + ((512, 2560),), *SMOL),
    AttentionCase("prefill 4096", ((4096, 4096),), *LLAMA),
    AttentionCase("prefill 8192", ((8192, 8192),), *LLAMA),
    AttentionCase("prefill 16384", ((16384, 16384),), *LLAMA),
    AttentionCase("chunk of 512 at 8192", ((512, 8192),), *LLAMA),
]
