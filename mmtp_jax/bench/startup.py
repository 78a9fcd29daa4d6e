"""`startup`: from a process's start to a server that is ready, cold and then warm.

Both servers share a cache directory that is empty at first, so the second finds the programs that
the first compiled. The model's files are there before.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mmtp_jax.weights.errors import ModelError
from mmtp_jax.weights.resolve import resolve_model

POLL_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class Start:
    """Seconds from the process's start to /health saying 200, and to each thing that it said it was
    doing before (the first word of the reason: importing, loading, compiling, ...)."""

    seconds: float
    phases: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Startup:
    """A start with an empty cache directory, and one with what it left there."""

    cold: Start
    warm: Start
    ratio: float
    cache_bytes: int


def startup(model: str, load_format: str, options: Sequence[str]) -> Startup:
    """Start `python -m mmtp_jax.serve` twice, with `options`. `ModelError` if it does not start."""
    path = str(resolve_model(model))
    command = [sys.executable, "-m", "mmtp_jax.serve", "--model", path, "--port", "0"]
    command += ["--load-format", load_format, *options]
    with tempfile.TemporaryDirectory(prefix="mmtp-startup-") as folder:
        environment = os.environ | {"MMTP_CACHE": folder}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        cold = _start(command, environment)
        warm = _start(command, environment)
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return Startup(cold, warm, warm.seconds / cold.seconds, size)


def _start(command: list[str], environment: dict[str, str]) -> Start:
    with running(command, environment) as (_, start):
        return start


@contextmanager
def running(command: list[str], environment: dict[str, str]) -> Iterator[tuple[str, Start]]:
    """A server that is ready: its address and how it started. It is stopped at the end.

    Raises `ModelError` if it ends before it is ready.
    """
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    log: list[str] = []
    url: list[str] = []

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            log.append(line)
            if found := re.search(r"listening on (http://\S+?);", line):
                url.append(found.group(1))

    reader = threading.Thread(target=read)
    reader.start()
    phases: dict[str, float] = {}
    try:
        while True:
            if process.poll() is not None:
                reader.join()
                said = " ".join((log or ["nothing"])[-1].split()).removeprefix("error: ")
                raise ModelError(f"the server ended before it was ready: {said}")
            reason = _reason(url[0]) if url else "starting"
            if reason is None:
                break
            phases.setdefault(reason, time.perf_counter() - begin)
            time.sleep(POLL_SECONDS)
        yield url[0], Start(time.perf_counter() - begin, phases)
    finally:
        process.terminate()
        process.wait()
        reader.join()
        assert process.stderr is not None
        process.stderr.close()


def _reason(url: str) -> str | None:
    """What keeps the server from being ready, as one word; None if it is."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=60):
            return None
    except urllib.error.HTTPError as error:
        with error:
            said: str = json.loads(error.read())["error"]["message"]
        return said.removeprefix("the engine is not ready: ").split()[0]
    except OSError:  # the server is about to end: its exit status tells
        return "starting"
