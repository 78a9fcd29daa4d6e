"""The commands that the README shows do what they should."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator

import pytest
from models_for_tests import JSON_CHARACTERS, write_tiny_llama
from server.running import ROOT, Server, running

ADDRESS = "http://127.0.0.1:8000"
NAME = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny model under the name that the README uses."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model = write_tiny_llama(folder, tokenizer=True, characters=JSON_CHARACTERS)
    options = ("--max-num-batched-tokens=32", "--row-multiple=32", "--max-model-len=512")
    with running(model, "--max-num-seqs=2", *options, f"--served-model-name={NAME}") as server:
        yield server


def blocks(language: str, word: str) -> list[str]:
    text = (ROOT / "README.md").read_text()
    found = re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [block for block in found if word in block]


def run(command: str) -> str:
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def test_curl_examples(server: Server) -> None:
    chat, stream, colour, metrics = (
        run(block.replace(ADDRESS, server.url)) for block in blocks("sh", "curl")
    )
    answer = json.loads(chat)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["model"] == NAME
    events = [line for line in stream.splitlines() if line]
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 16
    content = json.loads(colour)["choices"][0]["message"]["content"]
    assert json.loads(content)["colour"] in ("red", "green", "blue")
    assert "vllm:num_requests_running{" in metrics and "mmtp_steps_total{" in metrics


def test_client_example(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("python", "from openai")
    names: dict[str, object] = {}
    exec(block.replace(ADDRESS, server.url), names)
    names["client"].close()  # type: ignore[attr-defined]
    assert capsys.readouterr().out


def test_the_paths_of_the_table_exist(server: Server) -> None:
    table = re.findall(r"^\| (`/.*?) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    paths = {path for row in table for path in re.findall(r"`(/[^`]*)`", row)}
    with server.http() as client:
        known = set(client.get("/openapi.json").json()["paths"])
    assert paths - known == {"/docs", "/openapi.json", "/start_profile", "/stop_profile"}
