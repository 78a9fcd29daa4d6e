"""Starting, stopping, and what happens when a client, the engine or the HTTP process goes away."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from models_for_tests import write_tiny_llama
from server.running import NAME, Server, running, start, wait_ready

from mmtp_jax.serve import main

# A context that takes seconds to fill, so that something happens meanwhile; one program.
OPTIONS = (
    "--max-num-seqs=2",
    "--max-num-batched-tokens=32",
    "--row-multiple=32",
    "--max-model-len=512",
)
LONG = {"model": NAME, "prompt": "abc", "max_tokens": 500, "ignore_eos": True, "temperature": 0}
STREAM = LONG | {"stream": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", tokenizer=True)


@pytest.fixture
def begin(model: Path) -> Iterator[Callable[..., Server]]:
    """Start servers that the test ends itself."""
    servers: list[Server] = []

    def begin(*arguments: str, wait: bool = True) -> Server:
        servers.append(start(model, *OPTIONS, *arguments, wait=wait))
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


def lines_of(response: httpx.Response) -> Iterator[Any]:
    for line in response.iter_lines():
        if line and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    traces = tmp_path_factory.mktemp("traces")
    with running(model, *OPTIONS, f"--profile-dir={traces}", "--json-logs") as server:
        yield server


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(server: Server, stream: bool) -> None:
    before = server.metric("vllm:generation_tokens_total")
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(LONG | {"stream": stream, "n": 4}).encode()
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        deadline = time.monotonic() + 30
        while server.metric("vllm:num_requests_running") < 2:
            assert time.monotonic() < deadline
    steps = server.metric("mmtp_steps_total")
    server.wait_idle()
    # Two steps after the engine hears of it; the scrapes before and after see a few more.
    assert server.metric("mmtp_steps_total") - steps < 150
    assert server.metric("vllm:generation_tokens_total") - before < 1200
    assert server.metric("vllm:request_success_total") > 0


def test_profiles(server: Server) -> None:
    with server.http() as client:
        assert client.post("/stop_profile").status_code == 409
        directory = Path(client.post("/start_profile").json()["directory"])
        assert client.post("/start_profile").status_code == 409
        client.post("/v1/completions", json=LONG | {"max_tokens": 5})
        assert client.post("/stop_profile").status_code == 200
    traces = [path for path in directory.rglob("*") if path.is_file()]
    assert any(path.stat().st_size > 1000 for path in traces)


def test_logs_are_json_without_what_was_said(server: Server) -> None:
    secret = "my secret is 1234"
    with server.http() as client:
        client.post("/v1/completions", json=LONG | {"prompt": secret, "max_tokens": 5})
        client.post("/v1/completions", json={"prompt": secret, "max_tokens": -1})
    records = [json.loads(line) for line in server.log]
    assert any("POST /v1/completions" in record["message"] for record in records)
    assert all(record["level"] == "INFO" for record in records)
    assert secret not in "".join(server.log)


def test_open_requests_end_before_the_server_does(begin: Callable[..., Server]) -> None:
    server = begin("--log-requests")
    with server.http() as client, client.stream("POST", "/v1/completions", json=STREAM) as answer:
        chunks = lines_of(answer)
        next(chunks)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
        text = [chunk["choices"][0] for chunk in chunks]
    assert text[-1]["finish_reason"] == "length"
    assert server.process.wait(30) == 0
    assert any("'abc'" in line for line in server.log)


def test_the_grace_time_ends(begin: Callable[..., Server]) -> None:
    server = begin("--grace-seconds=0.2")
    with server.http() as client, client.stream("POST", "/v1/completions", json=STREAM) as answer:
        chunks = lines_of(answer)
        next(chunks)
        server.process.send_signal(signal.SIGTERM)
        *_, last = chunks
    assert last["error"]["code"] == "shutting_down"
    assert server.process.wait(10) == 0


def test_a_dead_engine_ends_everything(begin: Callable[..., Server]) -> None:
    server = begin()
    engine = server.engine_pid()
    with server.http() as client, client.stream("POST", "/v1/completions", json=STREAM) as answer:
        chunks = lines_of(answer)
        next(chunks)
        os.kill(engine, signal.SIGKILL)
        *_, last = chunks
        assert last["error"]["code"] == "engine_dead"
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 500 and "code -9" in health.json()["error"]["message"]
        assert client.post("/v1/completions", json=LONG).status_code == 500
    assert server.process.wait(20) == 1


def test_the_engine_does_not_outlive_the_http_process(begin: Callable[..., Server]) -> None:
    server = begin()
    engine = server.engine_pid()
    server.process.kill()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{engine}").exists():
        state = Path(f"/proc/{engine}/stat").read_text().split()[2]
        if state == "Z":
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_stopping_before_it_is_ready(begin: Callable[..., Server]) -> None:
    server = begin(wait=False)
    with server.http() as client:
        health = client.get("/health")
        assert health.status_code == 503 and health.headers["retry-after"]
        refused = client.post("/v1/completions", json=LONG)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_starting"
    assert server.stop() == 0


def test_interrupt_counts_as_a_stop(begin: Callable[..., Server]) -> None:
    server = begin(wait=False)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(20) == 0


def test_two_names_and_a_busy_port(begin: Callable[..., Server], model: Path) -> None:
    server = begin("--served-model-name", "a", "b")
    port = server.url.rsplit(":", 1)[1]
    done = subprocess.run(
        [sys.executable, "-m", "mmtp_jax.serve", f"--model={model}", f"--port={port}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and f"port {port}: " in done.stderr
    wait_ready(server)
    with server.http() as client:
        for name in ("a", "b"):
            answer = client.post("/v1/completions", json={"prompt": "x", "model": name})
            assert answer.json()["model"] == name


# What is wrong is found before the engine starts, and in it; the slow ones are like one of these.
WRONG = [
    (("--model=/nowhere/model.gguf",), "/nowhere/model.gguf"),
    (("--max-model-len=512", "--num-pages=4"), "num_pages must be >="),
    *(
        pytest.param(arguments, message, marks=pytest.mark.slow)
        for arguments, message in (
            (("--num-speculative-tokens=3",), "num_speculative_tokens=3 exceeds the 0 MTP module"),
            (("--max-model-len=1000",), "max_model_len must be <= 512"),
            (("--chat-template={% if %}",), "not valid jinja"),
        )
    ),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_what_cannot_be_served_ends_in_one_line(
    model: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mmtp_jax.serve", f"--model={model}", "--port=0", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ") and message in last
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--port=70000", "--port must be in [0, 65535]"),
        ("--max-waiting=-1", "--max-waiting"),
        ("--grace-seconds=nan", "--grace-seconds"),
        ("--api-key=", "--api-key"),
        ("--max-num-seqs=0", "max_num_seqs"),
        ("--gpu-memory-utilization=2", "memory_fraction"),
        ("--speculative-config=[]", "JSON object"),
        ('--speculative-config={"method": "eagle"}', "method"),
        ("--host=no.such.host.invalid", "cannot listen on no.such.host.invalid"),
        ("--chat-template=/nowhere.jinja", "cannot read /nowhere.jinja"),
        ("--dtype=int4", "--dtype"),
        ("--pipeline-parallel-size=2", "unrecognized arguments"),
    ],
)
def test_wrong_options_are_refused_at_once(
    argument: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main([argument])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_help_groups_flags_and_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for part in ("server:", "model:", "engine:", "cache:", "speculation:", "observation:"):
        assert part in text
    for part in ("--port N 0 takes a free one (default: 8000)", "--no-enable-prefix-caching"):
        assert part in text
