"""Timing the start of a server: of one that pretends, and (slow) of the real one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from models_for_tests import write_tiny_llama

from mmtp_jax.bench import startup
from mmtp_jax.bench.__main__ import main
from mmtp_jax.weights.errors import ModelError

# Compiles in 0.6 seconds, or in 0.2 when its cache directory says that it did so before.
PRETENDER = """
import http.server, json, os, pathlib, sys, time
cache = pathlib.Path(os.environ["MMTP_CACHE"]) / "compiled"
ready = time.monotonic() + (0.2 if cache.exists() else 0.6)
cache.write_bytes(b"123")
assert "JAX_COMPILATION_CACHE_DIR" not in os.environ

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        early = time.monotonic() < ready
        self.send_response(503 if early else 200)
        self.end_headers()
        error = {"message": "the engine is not ready: compiling 3 programs"}
        self.wfile.write(json.dumps({"error": error} if early else {}).encode())

server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(f"INFO listening on http://127.0.0.1:{server.server_port}; wait", file=sys.stderr, flush=True)
server.serve_forever()
"""


def pretend(monkeypatch: pytest.MonkeyPatch, folder: Path, program: str) -> Path:
    """Let `python` run a program whatever it is asked to run."""
    python = folder / "python"
    script = folder / "program.py"
    script.write_text(program)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(startup.sys, "executable", str(python))
    return script


def test_cold_and_warm_starts_share_a_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", os.devnull)
    pretend(monkeypatch, tmp_path, PRETENDER)
    result = startup.startup(str(write_tiny_llama(tmp_path / "model")), "auto", [])
    assert result.cold.seconds > 0.6 and result.warm.seconds > 0.2
    assert result.ratio == result.warm.seconds / result.cold.seconds
    assert list(result.cold.phases) == ["starting", "compiling"]
    assert 0 <= result.cold.phases["starting"] < result.cold.phases["compiling"]
    assert result.cold.phases["compiling"] < result.cold.seconds
    assert result.cache_bytes == 3


def test_the_server_gets_the_model_and_the_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, tmp_path, "import sys; sys.exit(' '.join(sys.argv[1:]))")
    model = write_tiny_llama(tmp_path / "model")
    with pytest.raises(ModelError) as error:
        startup.startup(str(model), "dummy", ["--max-num-seqs", "3"])
    expected = f"-m mmtp_jax.serve --model {model} --port 0 --load-format dummy --max-num-seqs 3"
    assert str(error.value).endswith(f"before it was ready: {expected}")


@pytest.mark.slow
def test_the_real_server_starts_faster_the_second_time(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    model = write_tiny_llama(tmp_path / "model", tokenizer=True)
    options = ["--max-num-seqs=2", "--max-num-batched-tokens=16", "--max-model-len=64"]
    assert main(["startup", f"--model={model}", f"--json={file}", "--", *options]) == 0
    result: dict[str, Any] = json.loads(file.read_text())["result"]
    assert result["ratio"] < 1 and result["cache_bytes"] > 0
    for start in (result["cold"], result["warm"]):
        assert {"importing", "loading"} <= set(start["phases"])
