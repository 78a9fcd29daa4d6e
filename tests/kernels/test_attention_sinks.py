"""Sinks (gpt-oss model card): a logit per head that takes weight and adds no value."""

from __future__ import annotations

import numpy as np
import pytest
from kernels.cases import assert_close, attend, check, make_batch


@pytest.mark.parametrize("window", [None, 20])
def test_sinks(window: int | None) -> None:
    check(make_batch(window=window), window=window, sinks=np.array([-100, 0, 2, 40], np.float32))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_sink_of_minus_infinity_is_no_sink(implementation: str) -> None:
    batch = make_batch()
    sinks = np.full(4, -np.inf, np.float32)
    with_sinks = attend(batch, implementation, scale=0.25, sinks=sinks)
    assert_close(with_sinks, attend(batch, implementation, scale=0.25), 1e-7)
