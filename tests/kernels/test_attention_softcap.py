"""Soft-capped scores (Gemma 2 report, arXiv 2408.00118): `softcap * tanh(score / softcap)`."""

from __future__ import annotations

import numpy as np
from kernels.cases import attend, check, make_batch


def test_softcap() -> None:
    check(make_batch(), scale=1.0, softcap=2.0)


def test_softcap_with_window_and_sinks() -> None:
    sinks = np.linspace(-1, 3, 4, dtype=np.float32)
    check(make_batch(window=20), scale=1.0, softcap=2.0, window=20, sinks=sinks)


def test_a_softcap_bounds_the_weights() -> None:
    """With scores in [-cap, cap], no weight of n keys exceeds 1 / (1 + (n - 1) exp(-2 cap))."""
    batch = make_batch()
    batch.v_pages[~np.isnan(batch.v_pages)] = 0.0
    first = batch.page_table[0, 0]
    batch.v_pages[0, first, 0] = 1.0  # the output is now the weight of request 0's first key
    cap = 0.5
    for implementation in ("reference", "xla"):
        weight = attend(batch, implementation, scale=100.0, softcap=cap)[16]  # its row with 70 keys
        assert (weight <= 1.0001 / (1 + 69 * np.exp(-2 * cap))).all()
        assert (weight > 0).all()
