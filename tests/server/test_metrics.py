"""What is counted comes out under the names that dashboards read."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from mmtp_jax.server.messages import Pages, Snapshot, Step
from mmtp_jax.server.metrics import Metrics

MODEL = 'a "name"\\of\na model'

# vllm/v1/metrics/loggers.py: the bounds that dashboards compute quantiles from.
VLLM_BOUNDS = {
    "vllm:time_to_first_token_seconds": (
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
        *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
    ),
    "vllm:inter_token_latency_seconds": (
        *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
        *(10.0, 20.0, 40.0, 80.0),
    ),
    "vllm:e2e_request_latency_seconds": (
        *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
        *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
    ),
}

Labels = frozenset[tuple[str, str]]


def samples(metrics: Metrics) -> dict[tuple[str, Labels], float]:
    """Every sample by name and labels but the model's, which must be there."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == MODEL
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found
            found[key] = sample.value
    return found


def of(name: str, **labels: str) -> tuple[str, Labels]:
    return name, frozenset(labels.items())


def step(seconds: float | None = 0.02) -> Step:
    pages = (Pages("full", 10, 5), Pages("window", 4, 3))
    return Step((), Snapshot(running=2, waiting=1, steps=7, preemptions=3, pages=pages), seconds)


def test_the_engine() -> None:
    metrics = Metrics(MODEL)
    assert not [name for name, _ in samples(metrics) if name.startswith("vllm:num_requests")], (
        "nothing is known before the first step"
    )
    metrics.engine_step(step())
    metrics.engine_step(step(seconds=None))
    expected = {
        of("vllm:num_requests_running"): 2,
        of("vllm:num_requests_waiting"): 1,
        of("mmtp_queue"): 1,
        of("vllm:kv_cache_usage_perc"): 0.75,
        of("mmtp_pages_total", group="full"): 10,
        of("mmtp_pages_total", group="window"): 4,
        of("mmtp_pages_used", group="full"): 5,
        of("mmtp_pages_used", group="window"): 3,
        of("vllm:num_preemptions_total"): 3,
        of("mmtp_preemptions_total"): 3,
        of("mmtp_steps_total"): 7,
        of("mmtp_step_seconds_count"): 1,
        of("mmtp_step_seconds_sum"): 0.02,
    }
    assert expected.items() <= samples(metrics).items()


def test_requests() -> None:
    metrics = Metrics(MODEL)
    metrics.first_token(0.5)
    metrics.next_tokens(0.03, 3)
    metrics.request_finished("stop", 2.0, prompt_tokens=10, cached_tokens=8)
    metrics.request_finished("length", 4.0, prompt_tokens=5, cached_tokens=0)
    metrics.request_finished("stop", 1.0, prompt_tokens=1, cached_tokens=0)
    for status in (404, 404, 500):
        metrics.http_error(status)
    found = samples(metrics)
    expected = {
        of("vllm:time_to_first_token_seconds_sum"): 0.5,
        of("vllm:time_to_first_token_seconds_count"): 1,
        of("vllm:inter_token_latency_seconds_count"): 3,
        of("vllm:e2e_request_latency_seconds_sum"): 7,
        of("vllm:e2e_request_latency_seconds_count"): 3,
        of("vllm:prompt_tokens_total"): 16,
        of("vllm:prefix_cache_queries_total"): 16,
        of("vllm:prefix_cache_hits_total"): 8,
        of("vllm:request_success_total", finished_reason="stop"): 2,
        of("vllm:request_success_total", finished_reason="length"): 1,
        of("mmtp_requests_total", finish_reason="stop"): 2,
        of("mmtp_requests_total", finish_reason="length"): 1,
        of("mmtp_http_errors_total", status="404"): 2,
        of("mmtp_http_errors_total", status="500"): 1,
    }
    assert expected.items() <= found.items()
    assert found[of("vllm:inter_token_latency_seconds_sum")] == pytest.approx(0.03)
    # Three tokens of 10 ms each, not one of 30 ms.
    assert found[of("vllm:inter_token_latency_seconds_bucket", le="0.025")] == 3


def test_speculation() -> None:
    metrics = Metrics(MODEL)
    metrics.know_drafts(3)
    metrics.verified(0, 0, 1)  # a first step has no drafts
    metrics.verified(3, 2, 3)
    metrics.verified(2, 0, 1)
    expected = {
        of("vllm:spec_decode_num_drafts_total"): 2,
        of("vllm:spec_decode_num_draft_tokens_total"): 5,
        of("vllm:spec_decode_num_accepted_tokens_total"): 2,
        of("vllm:generation_tokens_total"): 5,
        of("mmtp_verifications_total"): 3,
        of("mmtp_tokens_per_step"): 5 / 3,
    }
    for position, (drafted, accepted) in enumerate([(2, 1), (2, 1), (1, 0)]):
        at = {"position": str(position)}
        expected[of("vllm:spec_decode_num_accepted_tokens_per_pos_total", **at)] = accepted
        expected[of("mmtp_drafts_accepted_total", **at)] = accepted
        expected[of("mmtp_drafts_verified_total", **at)] = drafted
    assert expected.items() <= samples(metrics).items()


def buckets(metrics: Metrics, name: str) -> list[tuple[float, float]]:
    """Upper bounds and cumulative counts, in the order they are shown in."""
    return [
        (float(dict(labels)["le"]), value)
        for (found, labels), value in samples(metrics).items()
        if found == f"{name}_bucket"
    ]


@given(st.lists(st.floats(0, 1e4) | st.sampled_from([0.001, 0.01, 0.5, 2560.0]), max_size=20))
def test_buckets_count_what_is_not_above_their_bound(values: list[float]) -> None:
    metrics = Metrics(MODEL)
    for value in values:
        metrics.first_token(value)
    found = buckets(metrics, "vllm:time_to_first_token_seconds")
    assert found == [(bound, sum(value <= bound for value in values)) for bound, _ in found]
    assert found[-1][0] == float("inf")


@pytest.mark.parametrize("name", VLLM_BOUNDS)
def test_bounds_hold_those_of_vllm(name: str) -> None:
    bounds = [bound for bound, _ in buckets(Metrics(MODEL), name)]
    assert bounds == sorted(set(bounds))
    assert set(VLLM_BOUNDS[name]) <= set(bounds)


def test_counting_is_cheap() -> None:
    """64 requests of 200 steps, which may be what a second brings (checks of types included)."""
    metrics = Metrics(MODEL)
    metrics.know_drafts(8)
    one = step()
    begin = time.process_time()
    for _ in range(200):
        metrics.engine_step(one)
        for _ in range(64):
            metrics.verified(8, 4, 5)
            metrics.next_tokens(0.005, 5)
    assert time.process_time() - begin < 2
    assert samples(metrics)[of("vllm:generation_tokens_total")] == 64000
