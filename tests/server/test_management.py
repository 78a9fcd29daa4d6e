"""Models, health, version, metrics, tokenizer endpoints, limits and keys."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from server.running import NAME, SMALL, Server, running


def test_models(server: Server) -> None:
    (card,) = server.openai().models.list().data
    assert (card.id, card.max_model_len) == (NAME, 96)  # type: ignore[attr-defined]
    assert server.openai().models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        server.openai().models.retrieve("other")


def test_health_and_version(server: Server) -> None:
    with server.http() as client:
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/version").json()["version"]


def test_unknown_paths_and_methods(server: Server) -> None:
    with server.http() as client:
        for response, status in (
            (client.get("/nothing"), 404),
            (client.get("/v1/completions"), 405),
            (client.post("/start_profile"), 404),
        ):
            assert response.status_code == status
            assert response.json()["error"]["message"]


def test_tokenize_round_trip(server: Server) -> None:
    with server.http() as client:
        body = {"prompt": "some text", "return_token_strs": True}
        tokens = client.post("/tokenize", json=body).json()
        assert tokens["count"] == len("some text") == len(tokens["token_strs"])
        back = client.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
        assert back == {"prompt": "some text"}
        for path, bad, param in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "\ud800"}, "prompt"),
            ("/detokenize", {"tokens": [64]}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens"),
            ("/detokenize", {"tokens": "a"}, "tokens"),
        ):
            import json

            content = json.dumps(bad).encode()
            response = client.post(
                path, content=content, headers={"content-type": "application/json"}
            )
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param


def test_metrics_count_what_happened(server: Server) -> None:
    names = (
        "vllm:generation_tokens_total",
        "vllm:prompt_tokens_total",
        "vllm:time_to_first_token_seconds_count",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
    )
    before = [server.metric(name) for name in names]
    options = {"ignore_eos": True}
    server.openai().completions.create(
        model=NAME, prompt="metrics", max_tokens=12, temperature=0.0, extra_body=options
    )
    tokens, prompt, first, whole, drafts, draft_tokens = (
        server.metric(name) - old for name, old in zip(names, before, strict=True)
    )
    assert (tokens, prompt, first, whole) == (12, 7, 1, 1)
    # Every step but the first of a request verifies drafts, three at most.
    assert 1 <= drafts <= 11
    assert drafts <= draft_tokens <= 3 * drafts
    accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    by_position = server.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    assert accepted == by_position


@pytest.fixture(scope="module")
def guarded(tiny: Path) -> Iterator[Server]:
    """A server with a key, a small body limit, and room for two requests."""
    limits = ("--api-key=secret", "--max-body-bytes=2000", "--max-waiting=1", "--max-num-seqs=1")
    with running(tiny, *SMALL, *limits, "--profile-dir=profiles") as server:
        yield server


def test_the_key_is_needed(guarded: Server) -> None:
    with pytest.raises(openai.AuthenticationError):
        guarded.openai("wrong").models.list()
    with guarded.http() as client:
        assert client.get("/v1/models").status_code == 401
        assert client.get("/v1/models", headers={"Authorization": "secret"}).status_code == 401
        assert client.get("/health").status_code == 200
        assert client.get("/metrics").status_code == 200
    assert guarded.openai("secret").models.list().data[0].id == NAME


def test_large_bodies_are_refused(guarded: Server) -> None:
    headers = {"Authorization": "Bearer secret", "content-type": "application/json"}
    with guarded.http(headers=headers) as client:
        assert client.post("/v1/completions", content=b"x" * 2001).status_code == 413

        def chunks() -> Iterator[bytes]:
            for _ in range(30):
                yield b"x" * 100

        response = client.post("/v1/completions", content=chunks())
        assert response.status_code == 413
        assert "2000 bytes" in response.json()["error"]["message"]
    # One that lies about its length, then says nothing.
    host, port = guarded.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
            b"Content-Length: 100000000\r\n\r\n"
        )
        assert b"413" in connection.recv(100)


def test_too_many_requests(guarded: Server) -> None:
    client = guarded.openai("secret")
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model=NAME, prompt=["a", "b", "c"], max_tokens=2)
    assert caught.value.response.headers["retry-after"] == "1"
    assert len(client.completions.create(model=NAME, prompt=["a", "b"], max_tokens=2).choices) == 2


def test_wrong_content_type(server: Server) -> None:
    with server.http() as client:
        response = client.post("/v1/completions", content=b"a=1", headers={"content-type": "x/y"})
        assert response.status_code == 400


def test_openapi_document(server: Server) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    assert "/v1/chat/completions" in document["paths"]
    for path in document["paths"].values():
        assert all("422" not in operation["responses"] for operation in path.values())
