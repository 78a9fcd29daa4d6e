"""Prometheus metrics: ours under `mmtp_`, and under the names of vLLM that existing dashboards and
benchmarks read.

Counting is plain Python, because a step of many requests counts hundreds of times; metric families
are made when somebody asks.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from mmtp_jax.engine.stats import Acceptance
from mmtp_jax.server.messages import Step

# Upper bounds in seconds: all of those of vLLM's histograms (its vllm/v1/metrics/loggers.py), which
# dashboards expect, and finer ones where small models and speculation are fast.
_BELOW_ONE = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
_FIRST = (*_BELOW_ONE, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_SUB_SECOND = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75)
_TOKEN = (0.0005, 0.001, 0.0025, 0.005, *_SUB_SECOND, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_SECONDS = (1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, *_SECONDS)


class _Histogram:
    """Counts per bucket, and the sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        total, cumulative = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            cumulative.append(
                ("+Inf" if bound == float("inf") else str(float(bound)), float(total))
            )
        return cumulative

    @property
    def sum(self) -> float:
        return self._sum


class Metrics(Collector):
    """Everything that is counted; the event loop's thread calls all of it."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, model_name: str, num_drafts: int = 0) -> None:
        self._model = model_name
        self._step: Step | None = None
        self._step_seconds = _Histogram(_TOKEN)
        self._first_token = _Histogram(_FIRST)
        self._token = _Histogram(_TOKEN)
        self._whole = _Histogram(_WHOLE)
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._tokens = 0
        self._verifications = 0
        self._drafts = 0
        self._acceptance = Acceptance(num_drafts)
        self._finished: Counter[str] = Counter()
        self._errors: Counter[int] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def know_drafts(self, num_drafts: int) -> None:
        """How many drafts a request can have; counted from now on."""
        self._acceptance = Acceptance(num_drafts)

    def engine_step(self, step: Step) -> None:
        """A step was read."""
        self._step = step
        if step.seconds is not None:
            self._step_seconds.observe(step.seconds)

    def first_token(self, seconds: float) -> None:
        """A sample's first tokens came so long after its request."""
        self._first_token.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        """`count` tokens came at once, so long after the ones before: each took its share."""
        self._token.observe(seconds / count, count)

    def verified(self, drafted: int, accepted: int, tokens: int) -> None:
        """A step verified drafts of a sample, and gave it `tokens`."""
        self._tokens += tokens
        self._verifications += 1
        self._drafts += drafted > 0
        self._acceptance.count(drafted, accepted)

    def request_finished(
        self, reason: str, seconds: float, prompt_tokens: int, cached_tokens: int
    ) -> None:
        """A sample ended."""
        self._finished[reason] += 1
        self._whole.observe(seconds)
        self._prompt_tokens += prompt_tokens
        self._cached_tokens += cached_tokens

    def http_error(self, status: int) -> None:
        """A request was answered with an error."""
        self._errors[status] += 1

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Every family; prometheus_client calls this."""
        yield from self._engine()
        yield from self._requests()
        yield from self._speculation()

    def _engine(self) -> Iterator[Metric]:
        if self._step is None:
            return
        now = self._step.snapshot
        used = max((pages.referenced / pages.total for pages in now.pages), default=0.0)
        yield self._gauge("vllm:num_requests_running", "Requests that hold a slot.", now.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests in the queue.", now.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Used share of the cache's pages.", used)
        yield self._gauge("mmtp_requests_running", "Requests that hold a slot.", now.running)
        yield self._gauge("mmtp_queue", "Requests in the queue.", now.waiting)
        for name in ("vllm:num_preemptions", "mmtp_preemptions"):
            yield self._counter(name, "Requests put back into the queue.", now.preemptions)
        yield self._counter("mmtp_steps", "Steps of the engine.", now.steps)
        yield self._histogram("mmtp_step_seconds", "Time from step to step.", self._step_seconds)
        for name, text, counts in (
            ("mmtp_pages_total", "Pages of a cache group.", [one.total for one in now.pages]),
            (
                "mmtp_pages_used",
                "Pages that running requests refer to.",
                [one.referenced for one in now.pages],
            ),
        ):
            groups = [((one.group,), float(n)) for one, n in zip(now.pages, counts, strict=True)]
            yield self._family(GaugeMetricFamily, name, text, ("group",), groups)

    def _requests(self) -> Iterator[Metric]:
        yield self._histogram(
            "vllm:time_to_first_token_seconds", "Until a request's first token.", self._first_token
        )
        yield self._histogram(
            "vllm:inter_token_latency_seconds",
            "Between tokens; tokens of one step share its time.",
            self._token,
        )
        yield self._histogram(
            "vllm:e2e_request_latency_seconds", "From a request to its end.", self._whole
        )
        yield self._counter("vllm:prompt_tokens", "Prompt tokens.", self._prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Generated tokens.", self._tokens)
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens.", self._prompt_tokens)
        yield self._counter("vllm:prefix_cache_hits", "Those in the cache.", self._cached_tokens)
        reasons = [((reason,), float(n)) for reason, n in self._finished.items()]
        yield self._family(
            CounterMetricFamily,
            "vllm:request_success",
            "Requests that ended.",
            ("finished_reason",),
            reasons,
        )
        yield self._family(
            CounterMetricFamily,
            "mmtp_requests",
            "Requests that ended.",
            ("finish_reason",),
            reasons,
        )
        statuses = [((str(status),), float(n)) for status, n in self._errors.items()]
        yield self._family(
            CounterMetricFamily, "mmtp_http_errors", "Error answers.", ("status",), statuses
        )

    def _speculation(self) -> Iterator[Metric]:
        drafted, accepted = self._acceptance.drafted, self._acceptance.accepted
        yield self._counter("vllm:spec_decode_num_drafts", "Drafts (runs).", self._drafts)
        yield self._counter(
            "vllm:spec_decode_num_draft_tokens", "Draft tokens verified.", sum(drafted)
        )
        yield self._counter(
            "vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", sum(accepted)
        )
        for name, text, counts in (
            ("vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens.", accepted),
            ("mmtp_drafts_accepted", "Accepted draft tokens by depth.", accepted),
            ("mmtp_drafts_verified", "Verified draft tokens by depth.", drafted),
        ):
            values = [((str(position),), float(n)) for position, n in enumerate(counts)]
            yield self._family(CounterMetricFamily, name, text, ("position",), values)
        yield self._counter(
            "mmtp_verifications", "Request-steps that emitted tokens.", self._verifications
        )
        mean = self._tokens / self._verifications if self._verifications else 0.0
        yield self._gauge("mmtp_tokens_per_step", "Tokens per request and step.", mean)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._family(GaugeMetricFamily, name, text, (), [((), float(value))])

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._family(CounterMetricFamily, name, text, (), [((), float(value))])

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        labels: tuple[str, ...],
        values: Iterable[tuple[tuple[str, ...], float]],
    ) -> Metric:
        family = kind(name, text, labels=("model_name", *labels))
        for own, value in values:
            family.add_metric((self._model, *own), value)
        return family

    def _histogram(self, name: str, text: str, histogram: _Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._model,), histogram.buckets(), histogram.sum)
        return family
