"""When the requests of an open loop begin."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64


def arrivals(
    rate: float, burstiness: float, seed: int, *, count: int | None, duration: float | None
) -> Float64[np.ndarray, "N"]:
    """Seconds at which requests begin: the first `count`, or those within `duration`.

    The gaps between them are gamma distributed with mean `1 / rate` and shape `burstiness`, as in
    vLLM's benchmark: 1 is a Poisson process, less comes in bursts, more is evener.
    """
    rng = np.random.default_rng(seed)

    def gaps(number: int) -> Float64[np.ndarray, "N"]:
        return rng.gamma(burstiness, 1 / (rate * burstiness), number)

    if duration is None:
        assert count is not None
        return np.cumsum(gaps(count))
    block = int(rate * duration) + 16
    times = np.cumsum(gaps(block))
    while times[-1] < duration:
        times = np.concatenate([times, times[-1] + np.cumsum(gaps(block))])
    return times[times < duration]
