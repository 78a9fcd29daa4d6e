"""Registers on an H200: every block size that is chosen there, with none spilled to memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from aot.programs import needs_compiler

from mmtp_jax.sampling.state import ROW_SIZE
from pallas_kernels.aot import compile_for_h200
from pallas_kernels.choose_token.triton import choose_token
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.kv_write import Rotation, kv_write, rotate_and_write
from pallas_kernels.ragged_paged_attention import triton
from pallas_kernels.ragged_paged_attention.config import Call, Config, config_for

pytestmark = needs_compiler

DTYPES = ("bfloat16", "float32")
POSITIONS = 8192
# (requests, rows of each): decodes, windows of drafts, prompts and their chunks.
BATCHES = ((1, 1), (8, 1), (256, 1), (1, 9), (8, 9), (64, 9), (64, 16), (1, 512), (1, 8192))


def array(*shape: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@dataclass(frozen=True)
class Attention:
    """Heads and entries of a model's attention, and what it adds to the plain one."""

    num_kv_heads: int
    group: int
    key_dim: int
    value_dim: int
    latent: bool = False
    window: int | None = None
    sinks: bool = False

    def configs(self, dtype: str) -> list[Config]:
        """What is chosen for the batches, but for the number of parts."""
        chosen = [
            config_for(
                Call(
                    num_tokens=requests * rows,
                    num_requests=requests,
                    num_kv_heads=self.num_kv_heads,
                    group=self.group,
                    key_dim=self.key_dim,
                    itemsize=jnp.dtype(dtype).itemsize,
                    window=self.window,
                    positions=POSITIONS,
                )
            )
            for requests, rows in BATCHES
        ]
        chosen.sort(key=lambda config: config.splits)
        return list({replace(c, splits=min(c.splits, 2)): c for c in chosen}.values())


ATTENTION = {
    "64": Attention(3, 3, 64, 64),
    "80": Attention(8, 4, 80, 80),
    "96": Attention(8, 4, 96, 96),
    "128": Attention(8, 4, 128, 128),
    "192/128": Attention(8, 8, 192, 128, window=128, sinks=True),
    "256": Attention(2, 4, 256, 256),
    "576/512": Attention(1, 16, 576, 512, latent=True),
}


# In float32, these stand for the others.
WIDE = ("64", "128", "576/512")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "bfloat16") for name in ATTENTION),
        *(
            pytest.param(name, "float32", marks=() if name in WIDE else pytest.mark.slow)
            for name in ATTENTION
        ),
    ],
)
def test_attention(name: str, dtype: str) -> None:
    """All of them in one program, each compiled by itself."""
    case = ATTENTION[name]
    configs = case.configs(dtype)
    heads, dim, num_requests = case.num_kv_heads, case.key_dim, 8

    def attend(q: Any, k: Any, v: Any, sinks: Any, *rows: Any) -> jax.Array:
        for config in configs:  # each on what the one before returned: so their order is kept
            out = triton.ragged_paged_attention(
                q,
                k,
                v,
                1,
                *rows,
                scale=dim**-0.5,
                window=case.window,
                softcap=None,
                sinks=sinks,
                rel_rows=None,
                rel_table=None,
                value_dim=case.value_dim if case.latent else None,
                config=config,
            )
            q = q.at[..., : case.value_dim].set(out)
        return q

    report = compile_for_h200(
        attend,
        array(9 * num_requests, heads * case.group, dim, dtype=dtype),
        array(2, 4000, 16, heads, dim, dtype=dtype),
        None if case.latent else array(2, 4000, 16, heads, case.value_dim, dtype=dtype),
        array(heads * case.group, dtype="float32") if case.sinks else None,
        array(num_requests, POSITIONS // 16),
        array(num_requests + 1),
        array(num_requests),
    )
    kernels = report.named("ragged_paged_attention")
    for config, kernel in zip(configs, kernels, strict=True):
        assert kernel.spilled == 0, (config, kernel)
    assert bool(report.named("ragged_paged_attention_combine")) == any(
        config.splits > 1 and config.combines_apart for config in configs
    )
    others = set(report.kernels).difference(kernels)
    assert not any(kernel.spilled for kernel in others)


@pytest.mark.parametrize("dtype", DTYPES)
def test_writes(dtype: str) -> None:
    """Keys that are normed and rotated in part, smaller values; and rows as they are."""
    pages = {
        "k": array(2, 4000, 16, 8, 192, dtype=dtype),
        "v": array(2, 4000, 16, 8, 128, dtype=dtype),
    }

    def write(pages: Any, qkv: Any, slots: Any, angles: Any, scale: Any) -> Any:
        q, k, v = rotate_and_write(
            qkv,
            pages["k"],
            pages["v"],
            1,
            slots,
            angles,
            angles,
            rotation=Rotation(),
            q_scale=scale,
            k_scale=scale,
        )
        rows = {"k": q[:, :8], "v": q[:, 8:16, :128]}
        return q, kv_write({"k": k, "v": v}, rows, 0, slots)

    report = compile_for_h200(
        write,
        pages,
        array(72, 8, 8 * 192 + 192 + 128, dtype=dtype),
        array(72),
        array(72, 32, dtype="float32"),
        array(192, dtype=dtype),
        donate=0,
    )
    assert report.named("rotate_and_write") and report.named("kv_write")
    assert report.spilling == ()
    assert report.rewrites(pages["k"]) == report.rewrites(pages["v"]) == []


def test_choose_token() -> None:
    vocab_size = 201024
    report = compile_for_h200(
        choose_token,
        array(72, vocab_size, dtype="float32"),
        array(72),
        array(72),
        array(8, ROW_SIZE),
        array(8, vocab_size, dtype="float32"),
        array(8, 9, -(-vocab_size // 32)),
        array(8),
        array(8, 4096),
    )
    assert report.named("choose_token") and report.spilling == ()


@pytest.mark.parametrize("num_rows", [64, 2048, 24576])
@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_matmul(dtype: str, num_rows: int) -> None:
    """Every block size: few rows for each group, some, and many."""
    shapes = array(num_rows, 2048, dtype=dtype), array(64, 2048, 768, dtype=dtype), array(64)
    report = compile_for_h200(grouped_matmul, *shapes)
    [kernel] = report.named("grouped_matmul")
    assert kernel.spilled == 0 and report.spilling == ()
