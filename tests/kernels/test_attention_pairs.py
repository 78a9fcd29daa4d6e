"""The Triton kernel, interpreted, under any two of its options together: a pairwise cover.

The configuration is given, so that small batches are tiled and split as large ones are. The first
cases, which cover most of the pairs, run by default.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from kernels.cases import TOLERANCE, assert_close, attention_in_float64, make_batch
from kernels.pairs import pairwise

from pallas_kernels.ragged_paged_attention import triton
from pallas_kernels.ragged_paged_attention.config import Config

ROWS, POSITIONS, EXTENT = 48, 640, 24
# 63 keys are one less than whole blocks; 341 and 365 are whole blocks and one key below windows.
BATCHES = {
    "decode": ((1, 1), (1, 63), (1, 600), (1, 341), (1, 365)),
    "windows": ((9, 600), (5, 5), (9, 365), (3, 33), (9, 341)),
    "chunk": ((0, 0), (0, 30), (40, 600), (0, 0), (0, 0)),
    "empty requests": ((0, 0), (16, 16), (16, 480), (0, 5), (16, 16)),
    "mixed": ((17, 470), (1, 365), (20, 20), (0, 0), (4, 66)),
}
OPTIONS: dict[str, tuple[Any, ...]] = {
    "group": (1, 3, 4, 5, 7, 8),
    # Sizes of keys and of values; None: values are the first 64 entries of keys.
    "dims": ((64, 64), (128, 128), (192, 128), (256, 256), (80, 80), (80, None)),
    "page": (16, 32, 64, 128),
    "window": (None, 20, 300),
    "softcap": (None, 2.0),
    "sinks": (False, True),
    "relative": (False, True),
    "splits": (1, 2, 4, 8),
    "combines_apart": (False, True),
    "edges_apart": (False, True),
    "block_m": (16, 32, 64, 128),
    "block_k": (16, 32, 64),
    "split_keys": (16, 128),
    "batch": tuple(BATCHES),
    "dtype": ("float32", "bfloat16"),
}
LATENT = 64
CASES = pairwise(OPTIONS)
DEFAULT = 16

_attend = jax.jit(
    triton.ragged_paged_attention,
    static_argnames=("scale", "window", "softcap", "value_dim", "config"),
)


def name_of(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name_of(case), marks=[pytest.mark.slow] * (index >= DEFAULT))
        for index, case in enumerate(CASES)
    ],
)
def test_pairs(case: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    group, (key_dim, value_dim) = case["group"], case["dims"]
    num_kv_heads = 2 if group < 5 else 1
    num_heads = group * num_kv_heads
    batch = make_batch(
        BATCHES[case["batch"]],
        heads=(num_heads, num_kv_heads),
        dims=(key_dim, value_dim or LATENT),
        page=case["page"],
        num_rows=ROWS,
        positions=POSITIONS,
        window=case["window"],
        layers=2,
        layer=1,
    ).cast(case["dtype"])
    is_latent = value_dim is None
    if is_latent:
        batch = replace(batch, v_pages=batch.k_pages[..., :LATENT])
    options: dict[str, Any] = {
        "scale": key_dim**-0.5,
        "window": case["window"],
        "softcap": case["softcap"],
        "sinks": None,
        "rel_rows": None,
        "rel_table": None,
    }
    if case["sinks"]:
        options["sinks"] = rng.standard_normal(num_heads).astype(np.float32)
    if case["relative"]:
        options["rel_rows"] = rng.standard_normal((ROWS, num_heads, 3)).astype(np.float32)
        options["rel_table"] = rng.standard_normal((3, EXTENT)).astype(np.float32)
    sizes = ("block_m", "block_k", "splits", "split_keys", "edges_apart", "combines_apart")
    out = _attend(
        batch.q,
        batch.k_pages,
        None if is_latent else batch.v_pages,
        batch.layer,
        batch.page_table,
        batch.cu_q_lens,
        batch.kv_lens,
        value_dim=LATENT if is_latent else None,
        config=Config(num_warps=4, num_stages=2, **{name: case[name] for name in sizes}),
        **options,
    )
    assert out.dtype == batch.q.dtype
    assert not np.asarray(out)[batch.num_real :].any(), "padding rows must be zero"
    assert_close(np.asarray(out), attention_in_float64(batch, **options), TOLERANCE[case["dtype"]])


def test_the_cases_are_few_and_cover_every_pair() -> None:
    assert len(CASES) <= 100
    for a, b in itertools.combinations(OPTIONS, 2):
        met = {(case[a], case[b]) for case in CASES}
        assert met == set(itertools.product(OPTIONS[a], OPTIONS[b])), (a, b)


def test_pairs_of_three_options() -> None:
    """Four combinations do for three options of two values, as is known."""
    cases = pairwise({"a": (0, 1), "b": (0, 1), "c": (0, 1)})
    assert len(cases) == 4
