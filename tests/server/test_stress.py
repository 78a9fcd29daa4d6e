"""Many requests at once, most of them well behaved: no wrong token, nothing left behind."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from models_for_tests import JSON_CHARACTERS, write_tiny_llama
from server.running import NAME, Server, running, sse

from mmtp_jax import LLM, SamplingParams

CONCURRENT = 64
# Two programs. Pages hold fewer positions than a window has rows, the pool a request and a half.
SMALL = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "row_multiple": 16,
    "page_size": 2,
    "num_pages": 75,
    "max_model_len": 96,
}
WORDS = ["the ", "fox ", "jumps ", "over ", "a ", "lazy ", "dog ", "again "]


@dataclass(frozen=True)
class Case:
    """A request, and the texts that it must get."""

    fields: dict[str, Any]
    texts: tuple[str, ...]
    reasons: tuple[str, ...]


def specifications(count: int) -> list[dict[str, Any]]:
    rng = random.Random(7)
    made = []
    for seed in range(count):
        fields: dict[str, Any] = {
            "prompt": "".join(rng.choices(WORDS, k=rng.randint(1, 9))),
            "max_tokens": rng.choice([1, 3, 10, 20, 40]),
            "temperature": rng.choice([0.0, 0.0, 0.7, 1.0]),
            "seed": seed,
        }
        kind = rng.randrange(8)
        if kind == 0:
            fields["stop"] = rng.choice([["a"], ["e", "th"], ["1", "?x"]])
        elif kind == 1:
            fields["structured_outputs"] = {"regex": "(ab|c[0-9]){2,6}"}
        elif kind == 2:
            schema = {"type": "array", "items": {"enum": ["x", "yy"]}, "maxItems": 3}
            fields["structured_outputs"] = {"json": schema}
        elif kind == 3:
            fields |= {"ignore_eos": True, "min_tokens": 1}
        elif kind == 4:
            fields |= {"n": 2, "presence_penalty": 0.5}
        elif kind == 5:
            fields |= {"logprobs": 2, "top_k": 5}
        elif kind == 6:
            fields |= {"prompt_logprobs": 1}
        made.append(fields)
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return write_tiny_llama(
        folder, family="mimo", modules=3, tokenizer=True, characters=JSON_CHARACTERS
    )


@pytest.fixture(scope="module")
def cases(model: Path) -> list[Case]:
    """What the offline engine answers, without speculation."""
    given = specifications(60)
    params = [
        SamplingParams(**{name: value for name, value in fields.items() if name != "prompt"})
        for fields in given
    ]
    roomy = SMALL | {"num_pages": 400, "row_multiple": 32}
    plain = {"method": None}
    with LLM(str(model), speculative_config=plain, progress=False, **roomy) as llm:
        outputs = llm.generate([fields["prompt"] for fields in given], params)
    return [
        Case(
            fields,
            tuple(sample.text for sample in output.outputs),
            tuple(str(sample.finish_reason) for sample in output.outputs),
        )
        for fields, output in zip(given, outputs, strict=True)
    ]


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    with running(model, *options) as server:
        yield server


BAD: list[tuple[Any, int]] = [
    ({"prompt": "a" * 200}, 400),
    ({"prompt": "a", "temperature": -1}, 400),
    ({"prompt": "a", "guided_regex": "("}, 400),
    ({"prompt": [[99]]}, 400),
    ({"prompt": "a", "model": "other"}, 404),
    ([], 400),
]


async def one(client: httpx.AsyncClient, case: Case, rng: random.Random) -> str:
    """Send one request in some way, check what comes back, and say which way it was."""
    way = rng.choice(["whole", "whole", "stream", "stream", "leave", "cancel", "bad"])
    body = {"model": NAME, **case.fields}
    if way == "bad":
        wrong, status = rng.choice(BAD)
        response = await client.post("/v1/completions", json=wrong)
        assert response.status_code == status, response.text
    elif way == "whole":
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        choices = response.json()["choices"]
        assert tuple(choice["text"] for choice in choices) == case.texts
        assert tuple(choice["finish_reason"] for choice in choices) == case.reasons
    elif way == "cancel":
        task = asyncio.create_task(client.post("/v1/completions", json=body))
        await asyncio.sleep(rng.random() * 0.1)
        task.cancel()
        await asyncio.wait([task])
    else:
        await stream(client, body, case, leave_after=rng.randint(0, 4) if way == "leave" else None)
    return way


async def stream(
    client: httpx.AsyncClient, body: dict[str, Any], case: Case, leave_after: int | None
) -> None:
    lines: list[str] = []
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            lines.append(line)
            if leave_after is not None and len(lines) > leave_after:
                return
    choices = [choice for event in sse(lines) for choice in event["choices"]]  # type: ignore[attr-defined]
    for index, (text, reason) in enumerate(zip(case.texts, case.reasons, strict=True)):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == text
        assert mine[-1]["finish_reason"] == reason


def memory(pid: int) -> float:
    """Resident megabytes of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


async def storm(server: Server, cases: list[Case], count: int, seed: int) -> Counter[str]:
    rng = random.Random(seed)
    limits = httpx.Limits(max_connections=CONCURRENT)
    ways: Counter[str] = Counter()
    remaining = iter(range(count))

    async def worker(client: httpx.AsyncClient) -> None:
        for _ in remaining:
            ways[await one(client, rng.choice(cases), rng)] += 1

    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENT):
                group.create_task(worker(client))
    return ways


def check(server: Server, cases: list[Case], count: int) -> None:
    asyncio.run(storm(server, cases, count // 4, seed=1))
    server.wait_idle()
    pids = (server.process.pid, server.engine_pid())
    before = [memory(pid) for pid in pids]
    ways = asyncio.run(storm(server, cases, count, seed=2))
    assert ways.total() == count and len(ways) == 5
    server.wait_idle()
    growth = [memory(pid) - old for pid, old in zip(pids, before, strict=True)]
    print(f"{ways}, preemptions {server.metric('vllm:num_preemptions_total')}, growth {growth} MB")
    assert max(growth) < 40, growth
    assert server.metric("vllm:num_preemptions_total") > 0
    assert server.metric("mmtp_pages_used") == 0
    # And it still answers, correctly.
    with server.http() as client:
        assert client.get("/health").status_code == 200
        for case in cases[:5]:
            answer = client.post("/v1/completions", json=case.fields).json()
            assert tuple(choice["text"] for choice in answer["choices"]) == case.texts


def test_a_short_storm(server: Server, cases: list[Case]) -> None:
    check(server, cases, 200)


@pytest.mark.slow
def test_a_long_storm(server: Server, cases: list[Case]) -> None:
    check(server, cases, 2000)
