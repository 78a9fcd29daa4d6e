"""A server in a process of its own over a tiny model, for tests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

ROOT = Path(__file__).resolve().parent.parent.parent
START_SECONDS = 300
NAME = "tiny"

# Small pages and few of them: requests are preempted, and pages hold fewer rows than a window. One
# program, because compiling takes most of a server's start.
SMALL = (
    "--max-num-seqs=4",
    "--max-num-batched-tokens=16",
    "--row-multiple=16",
    "--page-size=4",
    "--num-pages=64",
    "--max-model-len=96",
)


@dataclass
class Server:
    """A running server. `log` collects its stderr."""

    process: subprocess.Popen[str]
    url: str
    log: list[str] = field(default_factory=list)
    reader: threading.Thread | None = None
    clients: list[Any] = field(default_factory=list)

    def close(self) -> None:
        """Kill it if it still runs, and free what belongs to it."""
        for client in self.clients:
            client.close()
        self.process.kill()
        self.process.wait()
        if self.reader is not None:
            self.reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def http(self, **options: object) -> httpx.Client:
        client = httpx.Client(base_url=self.url, timeout=120, **options)  # type: ignore[arg-type]
        self.clients.append(client)
        return client

    def openai(self, api_key: str = "none") -> openai.OpenAI:
        client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=120
        )
        self.clients.append(client)
        return client

    def metric(self, name: str) -> float:
        """The sum of a metric's samples, 0 without any."""
        with self.http() as client:
            text = client.get("/metrics").text
        values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for value in values)

    def wait_idle(self, seconds: float = 30) -> None:
        """Wait until no request runs or waits and no page is referred to."""
        names = (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
        )
        deadline = time.monotonic() + seconds
        while any(self.metric(name) for name in names):
            assert time.monotonic() < deadline, [self.metric(name) for name in names]
            time.sleep(0.05)

    def engine_pid(self) -> int:
        """The process id of the engine."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        for child in children.split():
            if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text():
                return int(child)
        raise AssertionError(f"no engine among {children!r}")

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def start(model: Path, *arguments: str, wait: bool = True) -> Server:
    """Start a server on a free port, named `NAME`; by default wait until it is ready."""
    command = [sys.executable, "-m", "mmtp_jax.serve", f"--model={model}", "--port=0"]
    command += [f"--served-model-name={NAME}", *arguments]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONWARNINGS": "error"},
    )
    server = Server(process, "")
    listening = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            server.log.append(line)
            found = re.search(r"listening on (http://\S+?);", line)
            if found:
                server.url = found.group(1)
                listening.set()
        listening.set()

    server.reader = threading.Thread(target=read, daemon=True)
    server.reader.start()
    assert listening.wait(60) and server.url, "".join(server.log)
    if wait:
        wait_ready(server)
    return server


def wait_ready(server: Server) -> None:
    """Wait for /health to say 200; it says 503 and why before."""
    deadline = time.monotonic() + START_SECONDS
    with server.http() as client:
        while True:
            health = client.get("/health")
            if health.status_code == 200:
                return
            assert health.status_code == 503, (health.text, "".join(server.log))
            assert "not ready" in health.json()["error"]["message"]
            assert time.monotonic() < deadline, "".join(server.log)
            time.sleep(0.1)


@contextmanager
def running(model: Path, *arguments: str) -> Iterator[Server]:
    """A ready server; afterwards it must stop in order and say nothing of errors."""
    server = start(model, *arguments)
    try:
        yield server
        server.wait_idle()
        assert server.stop() == 0, "".join(server.log)
        assert not [line for line in server.log if "Traceback" in line], "".join(server.log)
    finally:
        server.close()


def sse(lines: Sequence[str]) -> list[dict[str, object]]:
    """The events of a stream; the last one must be [DONE]."""
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data[-1] == "[DONE]", data
    return [json.loads(one) for one in data[:-1]]
