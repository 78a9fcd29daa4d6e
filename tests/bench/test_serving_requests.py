"""What `bench serving` sends, and when."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmtp_jax.bench.serving.arrivals import arrivals
from mmtp_jax.bench.serving.bodies import bodies
from mmtp_jax.bench.serving.options import ServingOptions
from mmtp_jax.bench.serving.processes import Run
from mmtp_jax.bench.serving.target import Target, said
from mmtp_jax.config import ConfigError


def test_arrivals_are_a_poisson_process_that_the_seed_decides() -> None:
    times = arrivals(50.0, 1.0, 3, count=20_000, duration=None)
    gaps = np.diff(times, prepend=0.0)
    assert len(times) == 20_000 and np.all(gaps >= 0)
    # The standard deviation of an exponential's mean over n is its mean / sqrt(n): 7 of them.
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.1)
    again = arrivals(50.0, 1.0, 3, count=20_000, duration=None)
    np.testing.assert_array_equal(times, again)
    assert not np.array_equal(times, arrivals(50.0, 1.0, 4, count=20_000, duration=None))
    # Another rate: the same, faster.
    np.testing.assert_allclose(arrivals(100.0, 1.0, 3, count=9, duration=None), times[:9] / 2)


def test_burstiness_is_that_of_the_gaps() -> None:
    for burstiness in (0.25, 4.0):
        gaps = np.diff(arrivals(10.0, burstiness, 0, count=20_000, duration=None), prepend=0.0)
        assert gaps.mean() == pytest.approx(0.1, rel=0.1)
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1)


def test_arrivals_fill_a_duration() -> None:
    for burstiness in (0.01, 1.0):
        for seed in range(5):
            times = arrivals(30.0, burstiness, seed, count=None, duration=20.0)
            assert np.all(times < 20) and np.all(np.diff(times) >= 0)
            if burstiness == 1:
                assert 450 < len(times) < 750


def test_processes_share_a_run() -> None:
    times = np.array([0.5, 1.0, 1.5, 2.0, 2.5])
    shares = [Run(1, 0, 5, arrivals=times).share(one, 2, 100.0) for one in range(2)]
    assert [list(one.indices) for one in shares] == [[0, 2, 4], [1, 3]]
    assert [one.arrivals for one in shares] == [(0.5, 1.5, 2.5), (1.0, 2.0)]
    assert [one.slots for one in shares] == [0, 0]
    shares = [Run(1, -3, 3, concurrency=5).share(one, 4, 100.0) for one in range(4)]
    assert [one.slots for one in shares] == [2, 1, 1, 1]
    assert {one.limit for one in shares} == {0}
    (share,) = [Run(1, 0, None, concurrency=5, duration=2.0).share(0, 1, 100.0)]
    assert share.deadline == 102 and share.limit == float("inf")


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"question": "2 + 2?", "answer": "4"}, "2 + 2?"),  # GSM8K
        ({"question_id": 81, "category": "writing", "turns": ["First", "Second"]}, "First"),
        ({"task_id": "HumanEval/0", "prompt": "def f():", "test": "x"}, "def f():"),
        ({"task_id": 1, "text": "Write a function", "code": "x"}, "Write a function"),  # MBPP
    ],
)
@pytest.mark.parametrize("name", ["set.jsonl", "set.jsonl.gz"])
def test_datasets(row: dict[str, Any], text: str, name: str, tmp_path: Path) -> None:
    file, line = tmp_path / name, json.dumps(row).encode()
    file.write_bytes(gzip.compress(line) if name.endswith(".gz") else line)
    chat = bodies(ServingOptions(dataset=file), "m").body(0, 0)
    assert json.loads(chat)["messages"] == [{"role": "user", "content": text}]
    completions = bodies(ServingOptions(dataset=file, endpoint="completions"), "m").body(0, 0)
    assert json.loads(completions)["prompt"] == text


def test_a_dataset_comes_in_an_order_of_the_seed_again_and_again(tmp_path: Path) -> None:
    file = tmp_path / "set.txt"
    file.write_text("".join(f"prompt {number}\n" for number in range(20)))

    def texts(seed: int) -> list[str]:
        made = bodies(ServingOptions(dataset=file, seed=seed), "m")
        asked = [json.loads(made.body(1, index)) for index in range(-3, 40)]
        return [one["messages"][0]["content"] for one in asked]

    warm_up, first, again = texts(0)[:3], texts(0)[3:23], texts(0)[23:]
    assert first == again and warm_up == first[-3:]
    assert sorted(first) == sorted(file.read_text().split("\n")[:-1])
    assert texts(1)[3:23] != first


def test_random_prompts_differ_between_requests_and_runs() -> None:
    def prompt(seed: int, run: int, index: int) -> list[int]:
        options = ServingOptions(random_input_len=(4, 6), random_ids=(3, 500), seed=seed)
        prompt: list[int] = json.loads(bodies(options, "m").body(run, index))["prompt"]
        assert 4 <= len(prompt) <= 6 and all(3 <= token <= 500 for token in prompt)
        return prompt

    keys = [(seed, run, index) for seed in (0, 1) for run in (0, 1) for index in (-2, -1, 0, 1)]
    assert len({tuple(prompt(*key)) for key in keys}) == len(keys)
    assert prompt(1, 1, -2) == prompt(1, 1, -2)


def test_other_fields_of_the_body_replace_those_that_are_sent() -> None:
    options = ServingOptions(extra_body={"temperature": 0.5, "stream_options": None}, max_tokens=3)
    body = json.loads(bodies(options, "m").body(0, 0))
    assert (body["temperature"], body["stream_options"], body["max_tokens"]) == (0.5, None, 3)
    assert "ignore_eos" not in body


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("http://host:80/v1", "http://host:80"),
        ("http://host/", "http://host:80"),
        ("https://host/some/where/v1/", "https://host:443/some/where"),
        ("http://[::1]:9", "http://[::1]:9"),
    ],
)
def test_addresses(address: str, url: str) -> None:
    target = Target.of(address, None)
    assert target.url == url
    assert target.post("/v1/completions").startswith(
        f"POST {target.path}/v1/completions HTTP/1.1\r\nHost: {url.split('/')[2]}\r\n".encode()
    )


@pytest.mark.parametrize(
    "address",
    [
        *("host", "ftp://host", "http://", "http://a@host", "http://h/ä"),
        *("http://h/a b", "http://a b:1", "http://a..b:1", f"http://{64 * 'a'}.b"),
    ],
)
def test_wrong_addresses(address: str) -> None:
    with pytest.raises(ConfigError, match="--base-url must"):
        Target.of(address, None)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "too\\n long"}}', ": too long"),
        (b'{"error": "busy"}', ": busy"),
        (b'{"message": "no"}', ": no"),
        (b'{"detail": "Not Found"}', ": Not Found"),
        (b'{"detail": [1]}', ""),
        (b"[]", ""),
        (b"<html>", ""),
    ],
)
def test_what_an_error_says(body: bytes, text: str) -> None:
    assert said(body) == text
