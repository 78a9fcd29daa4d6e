"""Arguments that cannot work raise ValueError with a sentence that names them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from kernels.cases import make_batch

from pallas_kernels.ragged_paged_attention import ragged_paged_attention


def call(heads: tuple[int, int] = (4, 2), **options: Any) -> None:
    batch = make_batch(((2, 4),), heads=heads, num_rows=2, positions=16)
    arrays = (batch.q, batch.k_pages, batch.v_pages, 0)
    lengths = (batch.page_table, batch.cu_q_lens, batch.kv_lens)
    ragged_paged_attention(
        *(jnp.asarray(array) for array in (*arrays, *lengths)), **{"scale": 0.25, **options}
    )


REL_ROWS, REL_TABLE = jnp.zeros((2, 4, 3)), jnp.zeros((3, 8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"implementation": "cuda"},
            "implementation must be one of triton, xla, reference.*'cuda'",
        ),
        ({"heads": (4, 3)}, "query heads 4 must be a multiple of key heads 3"),
        ({"window": 0}, "window must be >= 1, got 0"),
        ({"window": -1}, "window must be >= 1, got -1"),
        ({"rel_rows": REL_ROWS}, "rel_rows and rel_table go together"),
        ({"rel_table": REL_TABLE}, "rel_rows and rel_table go together"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**options)


def test_right_arguments() -> None:
    """The same call without a fault raises nothing."""
    call(rel_rows=REL_ROWS, rel_table=REL_TABLE, window=np.iinfo(np.int32).max)
