"""What a run comes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from mmtp_jax.bench.serving.events import Counted, Measured

COUNTED: tuple[Counted, ...] = ("usage", "averaged", "chunks")


@dataclass(frozen=True)
class Distribution:
    """Mean and percentiles of something, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Measures:
    """Times of the requests that were answered, in milliseconds; null if there are none.

    `ttft`: from sending a request to its first tokens. `tpot`: from the first tokens to the last,
    by the tokens after the first. `itl`: of every token after the first chunk, its share of the
    time since the chunk before. `chunk_gap`: from chunk to chunk, which is what came at once.
    `e2e`: to the end of the answer. `connect`: what opening a connection took before, if one was
    opened. `seconds`: from the first request to the end of the last answer.

    `tokens_per_chunk` says how the tokens of a chunk are known: "usage" (told with each),
    "averaged" (a request's mean) or "chunks" (one each: the server tells no usage).
    """

    requests: int
    succeeded: int
    failures: dict[str, int]
    seconds: float
    output_tokens: int
    input_tokens: int | None
    cached_input_tokens: int | None
    output_tokens_per_second: float
    requests_per_second: float
    goodput: float | None
    tokens_per_chunk: Counted | None
    mean_tokens_per_chunk: float | None
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    chunk_gap_ms: Distribution | None
    e2e_ms: Distribution | None
    connect_ms: Distribution | None


def measures(requests: Sequence[Measured], goals: dict[str, float]) -> Measures:
    """`goals`: milliseconds by "ttft", "tpot" and "e2e" that a request takes at most to count in
    `goodput`, those per second; without goals it is null."""
    good = [one for one in requests if one.failure is None]
    failures = Counter(one.failure for one in requests if one.failure is not None)
    begin = min((one.begin for one in good), default=0.0)
    seconds = max((one.end for one in good), default=0.0) - begin
    tokens = sum(one.output_tokens for one in good)
    gaps = _joined(np.diff(one.times) for one in good)
    later = _joined(one.tokens[1:] for one in good)
    chunks = sum(len(one.tokens) for one in good)
    counted = max((one.counted for one in good), key=COUNTED.index, default=None)

    def rate(number: float) -> float:
        return number / seconds if good else 0.0

    def spread(
        values: Iterable[float | None], weights: Float64[np.ndarray, "N"] | None = None
    ) -> Distribution | None:
        known = np.array([value for value in values if value is not None])
        return distribution(1e3 * known, weights)

    return Measures(
        requests=len(requests),
        succeeded=len(good),
        failures=dict(failures.most_common()),
        seconds=seconds,
        output_tokens=tokens,
        input_tokens=_total(one.input_tokens for one in good),
        cached_input_tokens=_total(one.cached_tokens for one in good),
        output_tokens_per_second=rate(tokens),
        requests_per_second=rate(len(good)),
        goodput=rate(sum(meets(one, goals) for one in good)) if goals else None,
        tokens_per_chunk=counted,
        mean_tokens_per_chunk=tokens / chunks if chunks else None,
        ttft_ms=spread(map(ttft, good)),
        tpot_ms=spread(map(tpot, good)),
        itl_ms=distribution(1e3 * gaps / later, later),
        chunk_gap_ms=distribution(1e3 * gaps),
        e2e_ms=spread(map(e2e, good)),
        connect_ms=spread(one.connect_seconds or None for one in requests),
    )


def ttft(request: Measured) -> float:
    """Seconds to the first tokens."""
    return float(request.times[0]) - request.begin


def tpot(request: Measured) -> float | None:
    """Seconds per token after the first; None if there is no other."""
    later = request.output_tokens - 1
    return float(request.times[-1] - request.times[0]) / later if later > 0 else None


def e2e(request: Measured) -> float:
    """Seconds to the end."""
    return request.end - request.begin


def meets(request: Measured, goals: dict[str, float]) -> bool:
    """Whether nothing took longer; what there is not, such as the time between tokens of a single
    one, took no time."""
    taken = {"ttft": ttft(request), "tpot": tpot(request), "e2e": e2e(request)}
    return all(1e3 * (taken[name] or 0) <= limit for name, limit in goals.items())


def distribution(
    values: Float64[np.ndarray, "N"], weights: Float64[np.ndarray, "N"] | None = None
) -> Distribution | None:
    """None without values. A percentile is the smallest value that the share of all values (or of
    their `weights`) up to it reaches; a weight is as good as so many equal values."""
    if not len(values):
        return None
    if weights is None:
        weights = np.ones(len(values))
    order = np.argsort(values)
    ascending, reached = values[order], np.cumsum(weights[order])
    # A little less, because sums of weights are rounded.
    asked = np.array([0.5, 0.9, 0.99]) * reached[-1] * (1 - 1e-12)
    p50, p90, p99 = ascending[np.searchsorted(reached, asked)].tolist()
    return Distribution(float(np.average(values, weights=weights)), p50, p90, p99)


def _joined(parts: Iterable[Float64[np.ndarray, "_"]]) -> Float64[np.ndarray, "N"]:
    return np.concatenate([np.empty(0), *parts])


def _total(counts: Iterable[int | None]) -> int | None:
    """The sum; None if any is unknown."""
    known = list(counts)
    return None if None in known else sum(one for one in known if one is not None)
