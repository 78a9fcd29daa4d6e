"""What `bench serving` makes of the answers."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from bench.fake_server import DONE, event, faking
from hypothesis import given
from hypothesis import strategies as st

from mmtp_jax.bench.serving.acceptance import acceptance, counts
from mmtp_jax.bench.serving.connection import IDLE_SECONDS, Answer, Client
from mmtp_jax.bench.serving.events import Measured, measured
from mmtp_jax.bench.serving.measures import distribution, measures, tpot
from mmtp_jax.bench.serving.target import Target


def request(
    times: list[float], tokens: list[float], failure: str | None = None, **others: Any
) -> Measured:
    """Of a request that began at 10 and ended half a second after its last tokens."""
    facts: dict[str, Any] = {
        "begin": 10.0,
        "end": 10.5 + max(times, default=0),
        "connect_seconds": 0.0,
        "times": 10 + np.array(times, np.float64),
        "tokens": np.array(tokens, np.float64),
        "output_tokens": int(sum(tokens)),
        "counted": "usage",
        "input_tokens": 5,
        "cached_tokens": None,
        "failure": failure,
    }
    return Measured(**facts | others)


def answer(*reads: bytes, **others: Any) -> Answer:
    """One whose reads came at 1, 2, 3, ..."""
    facts: dict[str, Any] = {"begin": 0.5, "status": 200, "content_type": b"text/event-stream"}
    made = Answer(**facts | others)
    for number, read in enumerate(reads, start=1):
        made.body += read
        made.times.append(float(number))
        made.ends.append(len(made.body))
    made.end = float(len(reads))
    return made


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5)), min_size=1, max_size=50),
)
def test_weights_are_as_good_as_equal_values(pairs: list[tuple[float, int]]) -> None:
    values, weights = (np.array(column, np.float64) for column in zip(*pairs, strict=True))
    repeated = np.sort(np.repeat(values, weights.astype(int)))
    one, scaled = distribution(values, weights), distribution(values, 7.5 * weights)
    assert one is not None and scaled is not None
    assert (one.p50, one.p90, one.p99) == (scaled.p50, scaled.p90, scaled.p99)
    for share, percentile in ((50, one.p50), (90, one.p90), (99, one.p99)):
        # The nearest rank, counted from 1: the share of all, rounded up.
        assert percentile == repeated[-(-share * len(repeated) // 100) - 1]
    assert one.mean == pytest.approx(repeated.mean())


def test_percentiles() -> None:
    one = distribution(np.arange(100, 0, -1, dtype=np.float64))
    assert one is not None
    assert (one.mean, one.p50, one.p90, one.p99) == (50.5, 50, 90, 99)
    assert distribution(np.empty(0)) is None


def test_measures_of_requests() -> None:
    requests = [
        request([0.1, 0.3, 0.4], [1, 4, 2], connect_seconds=0.05),
        request([0.3], [1], begin=9.0, cached_tokens=2),
        request([], [], failure="no luck"),
        request([], [], failure="no luck"),
        request([], [], failure="worse"),
    ]
    one = measures(requests, {"ttft": 150.0, "e2e": 2000.0})
    assert (one.requests, one.succeeded, one.failures) == (5, 2, {"no luck": 2, "worse": 1})
    assert one.seconds == pytest.approx(1.9)
    assert (one.output_tokens, one.input_tokens, one.cached_input_tokens) == (8, 10, None)
    assert one.output_tokens_per_second == pytest.approx(8 / 1.9)
    assert one.requests_per_second == pytest.approx(2 / 1.9)
    assert one.goodput == pytest.approx(1 / 1.9)
    assert one.tokens_per_chunk == "usage" and one.mean_tokens_per_chunk == 2
    assert one.ttft_ms is not None and one.ttft_ms.p50 == pytest.approx(100)
    assert one.ttft_ms.p99 == pytest.approx(1300)
    assert one.tpot_ms is not None and one.tpot_ms.mean == pytest.approx(50)
    # Four tokens of 50 ms each, two of 50; the gaps are 200 and 100.
    assert one.itl_ms is not None and one.itl_ms.mean == pytest.approx(50)
    assert one.chunk_gap_ms is not None and one.chunk_gap_ms.mean == pytest.approx(150)
    assert one.e2e_ms is not None and one.e2e_ms.p99 == pytest.approx(1800)
    assert one.connect_ms is not None and one.connect_ms.mean == pytest.approx(50)


def test_the_time_of_a_token_weighs_as_much_as_tokens_came() -> None:
    one = measures([request([0.0, 0.9, 1.0], [1, 9, 1])], {}).itl_ms
    assert one is not None
    assert one.mean == pytest.approx(100) and one.p50 == pytest.approx(100)
    one = measures([request([0.0, 0.1, 1.0], [1, 98, 1])], {}).itl_ms
    assert one is not None
    assert one.p99 == pytest.approx(900) and one.p90 == pytest.approx(100 / 98)


def test_goodput() -> None:
    requests = [request([0.1, 0.1 + 0.02 * gap], [1, 1]) for gap in range(1, 6)]
    single = request([0.2], [1])
    assert tpot(single) is None
    all_of_them = [*requests, single]
    for goals, good in (
        ({"tpot": 50.0}, 3),  # those of 20 and 40 ms, and the single token
        ({"tpot": 50.0, "ttft": 150.0}, 2),
        ({"ttft": 50.0}, 0),
        ({"e2e": 1e6}, 6),
    ):
        one = measures(all_of_them, goals)
        assert one.goodput == pytest.approx(good / one.seconds)
    assert measures(all_of_them, {}).goodput is None


def test_nothing_was_answered() -> None:
    one = measures([request([], [], failure="no luck")], {"ttft": 1.0})
    assert one.goodput == one.output_tokens_per_second == one.requests_per_second == 0
    assert one.ttft_ms is one.itl_ms is one.tokens_per_chunk is one.mean_tokens_per_chunk is None
    assert measures([], {}).requests == 0


@pytest.mark.parametrize("chat", [False, True])
def test_tokens_are_told_by_usage(chat: bool) -> None:
    first, second, third = (event("x", total, chat=chat) for total in (0, 2, 7))
    # An event without text may bring tokens, and what comes at once counts once.
    empty = event("", 9, chat=chat)
    one = measured(answer(first, second[:9], second[9:] + third, empty, empty + DONE))
    assert one.failure is None and one.counted == "usage"
    assert one.times.tolist() == [3, 4] and one.tokens.tolist() == [7, 2]
    assert (one.begin, one.end, one.output_tokens, one.input_tokens) == (0.5, 5, 9, 7)


def test_tokens_are_averaged_if_only_the_end_tells() -> None:
    texts = [event("x", None, chat=True) for _ in range(4)]
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 10}}\n\n'
    one = measured(answer(texts[0], texts[1] + texts[2], texts[3], usage + DONE))
    assert (one.counted, one.output_tokens, one.input_tokens) == ("averaged", 10, 3)
    assert one.times.tolist() == [1, 2, 3] and one.tokens.tolist() == [2.5, 5, 2.5]
    assert measures([one], {}).tokens_per_chunk == "averaged"


def test_every_chunk_counts_as_a_token_if_nothing_tells() -> None:
    one = measured(answer(*(event("x", None, chat=False) for _ in range(3)), DONE))
    assert (one.counted, one.output_tokens, one.input_tokens) == ("chunks", 3, None)
    assert measures([one, request([0.1], [1])], {}).input_tokens is None


def test_all_forms_of_lines_and_of_what_a_model_says() -> None:
    said = ({"reasoning_content": "x"}, {"reasoning": "x"}, {"tool_calls": [{}]}, {"content": "x"})
    for end in (b"\n\n", b"\r\n\r\n", b"\r\r"):
        lines = [json.dumps({"choices": [{"delta": delta}]}).encode() for delta in said]
        reads = [b": a comment" + end, *(b"data:" + line + end for line in lines)]
        one = measured(answer(*reads, b"event: x" + end, b"data: [DONE]" + end))
        assert one.failure is None and one.times.tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        ("status", "HTTP 503: not today"),
        ("no stream", "the answer is no stream of events, but application/json"),
        ("no HTTP", "the answer is not HTTP (HttpParserError)"),
        ("no tokens", "the answer has no tokens"),
        ("breaks off", "the stream broke off"),
        ("never ends", "timed out after 0.2 s"),
        ("error event", "an event says error: not today"),
        ("no JSON", "an event is not one of OpenAI's API"),
        ("deep JSON", "an event is not one of OpenAI's API"),
        ("early hints", None),
        ("says more", None),
    ],
)
def test_failures(failure: str, said: str | None) -> None:
    with faking(failure=failure) as fake:
        target = Target.of(fake.url, None)
        one = asyncio.run(ask(target, 0.2 if failure == "never ends" else 30))
    assert one.failure == said


def test_nobody_listens() -> None:
    with faking() as fake:
        target = Target.of(fake.url, None)
    one = asyncio.run(ask(target, 30))
    assert one.failure == "cannot connect: Connection refused"


async def ask(target: Target, timeout: float) -> Measured:
    client, made = Client(target, timeout), Answer()
    await client.ask(target.post("/v1/completions") + b"2\r\n\r\n{}", made)
    client.close()
    return measured(made)


def test_a_connection_is_used_again_unless_it_idled_or_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def connections(*pauses: float) -> list[float]:
        client, made = Client(Target.of(fake.url, None), 30), []
        for pause in pauses:
            await asyncio.sleep(pause)
            answer = Answer()
            await client.ask(client._target.post("/v1/completions") + b"2\r\n\r\n{}", answer)
            made.append(answer.connect_seconds)
        client.close()
        return made

    assert IDLE_SECONDS < 5
    monkeypatch.setattr("mmtp_jax.bench.serving.connection.IDLE_SECONDS", 0.2)
    with faking(interval=0.0) as fake:
        first, second, third = asyncio.run(connections(0, 0, 0.3))
        assert first > 0 and second == 0 and third > 0
        fake.failure = "breaks off"
        assert all(asyncio.run(connections(0, 0)))


VLLM = """
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a {b} c"} 8.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a {b} c"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="m",position="1"} 1.7e9
"""
OURS = """
mmtp_drafts_verified_total{model_name="m",position="0"} 10.0
mmtp_drafts_verified_total{model_name="m",position="1"} 4.0
"""


def test_acceptance() -> None:
    with faking(metrics=[VLLM, VLLM + OURS, "up 1\n"]) as fake:
        target = Target.of(fake.url, None)
        theirs, ours, none, missing = (counts(target) for _ in range(4))
    assert none is None and missing is None and counts(target) is None
    assert theirs is not None and ours is not None
    one = acceptance(Counter(), theirs)
    assert one is not None
    assert (one.drafts, one.drafted, one.accepted) == (10, None, [7, 2])
    assert one.rate == [0.7, 0.2] and one.mean_length == pytest.approx(1.9)
    one = acceptance(Counter(), ours)
    assert one is not None and one.drafted == [10, 4] and one.rate == [0.7, 0.5]
    assert acceptance(ours, ours) is None
    assert acceptance(None, ours) is None and acceptance(ours, None) is None


@pytest.mark.parametrize("value", ["NaN", "+Inf", "many"])
def test_counters_that_are_no_numbers(value: str) -> None:
    with faking(metrics=[VLLM.replace("8.0", value)]) as fake:
        assert counts(Target.of(fake.url, None)) is None
