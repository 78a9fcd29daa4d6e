"""The Triton kernel on a GPU against float32: fresh random inputs, NaN wherever no row may look."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernels.cases import assert_close, attend, attention_in_float64, make_batch

pytestmark = pytest.mark.gpu

# (query heads, key heads), (key size, value size)
SHAPES = [
    ((9, 3), (64, 64)),
    ((32, 8), (128, 128)),
    ((10, 2), (128, 128)),
    ((14, 2), (64, 64)),
    ((16, 4), (192, 128)),
    ((4, 2), (256, 256)),
    ((8, 1), (80, 80)),
]
# Windows of drafts, plain decodes, chunks with decodes; long contexts are split.
BATCHES = {
    "windows": ((9, 700), (9, 9), (0, 0), (5, 1300), (1, 130)),
    "decode": ((1, 1), (1, 64), (1, 2047), (1, 128), (1, 1000)),
    "one window": ((9, 2048), (0, 0), (0, 0), (0, 0), (0, 0)),
    "mixed": ((300, 900), (9, 300), (1, 1500), (0, 0), (65, 65)),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("heads, dims", SHAPES)
def test_shapes(heads: tuple[int, int], dims: tuple[int, int], name: str, dtype: str) -> None:
    seed = int(np.random.default_rng().integers(2**31))
    requests = BATCHES[name]
    num_rows = sum(rows for rows, _ in requests) + 3
    batch = make_batch(
        requests,
        heads=heads,
        dims=dims,
        num_rows=num_rows,
        positions=2048,
        layers=2,
        layer=1,
        seed=seed,
    ).cast(dtype)
    for _ in range(2):  # the tickets of split keys are as they were
        compare(batch, dims[0], seed)


@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize("feature", ["window", "softcap", "sinks", "relative"])
def test_features(feature: str, page: int) -> None:
    rng = np.random.default_rng()
    requests = BATCHES["mixed"]
    num_rows = sum(rows for rows, _ in requests) + 3
    options: dict[str, Any] = {
        "window": {"window": 100},
        "softcap": {"softcap": 3.0},
        "sinks": {"sinks": np.float32(rng.standard_normal(8))},
        "relative": {
            "rel_rows": np.float32(rng.standard_normal((num_rows, 8, 16))),
            "rel_table": np.float32(rng.standard_normal((16, 200))),
        },
    }[feature]
    batch = make_batch(
        requests,
        heads=(8, 2),
        dims=(128, 128),
        num_rows=num_rows,
        positions=2048,
        page=page,
        window=options.get("window"),
        seed=int(rng.integers(2**31)),
    )
    compare(batch, 128, 0, **options)


def compare(batch: Any, dim: int, seed: int, **options: Any) -> None:
    scale = dim**-0.5
    want = attention_in_float64(batch, scale=scale, **options)
    got = attend(batch, "triton", scale=scale, **options)
    assert not got[batch.num_real :].any(), "padding rows must be zero"
    tolerance = {"float32": 3e-6, "bfloat16": 1e-2}[str(batch.q.dtype)]
    if "rel_rows" in options:
        tolerance = 1e-3  # the product of rows and table is XLA's, in tf32
    assert_close(got, want, tolerance)
