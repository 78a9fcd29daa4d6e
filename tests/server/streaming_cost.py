"""Run by hand: does streaming to 64 clients slow the engine's loop?

The same 64 requests run in turn without clients (the core's loop alone), as 64 whole answers, and
as 64 streams, several times. The figure is the engine's own time from step to step. Clients are raw
sockets in another process, because a Python HTTP client costs more than the server.

    python tests/server/streaming_cost.py [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

CLIENTS = 64
TOKENS = 1000
ROUNDS = 15
OPTIONS = {
    "max_num_seqs": CLIENTS,
    "max_num_batched_tokens": 512,
    "max_model_len": 2048,
    "num_pages": 10000,
}


async def ask(url: str, index: int, stream: bool) -> int:
    """One request; the number of events it got."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(
        {
            "prompt": [5 + index % 50, 7],
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": stream,
        }
    ).encode()
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 22)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    events = 0
    while chunk := await reader.read(1 << 20):
        events += chunk.count(b"data: ")
    writer.close()
    return events


def clients(url: str, stream: bool, results: Any) -> None:
    async def all_of_them() -> list[int]:
        return await asyncio.gather(*(ask(url, index, stream) for index in range(CLIENTS)))

    results.put(sum(asyncio.run(all_of_them())))


def served(server: Any, stream: bool) -> tuple[float, float, int]:
    """Milliseconds per step of the engine, seconds until the last byte, events."""
    names = ("mmtp_step_seconds_sum", "mmtp_step_seconds_count")
    before = [server.metric(name) for name in names]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=clients, args=(server.url, stream, results))
    begin = time.perf_counter()
    process.start()
    events = results.get()
    elapsed = time.perf_counter() - begin
    process.join()
    server.wait_idle()
    seconds, steps = (server.metric(name) - old for name, old in zip(names, before, strict=True))
    return 1e3 * seconds / steps, elapsed, events


def alone(model: Path) -> list[float]:
    """Milliseconds per step of the core's loop with nobody to tell, once per round."""
    from mmtp_jax.config import engine_config
    from mmtp_jax.engine.core import EngineCore
    from mmtp_jax.loader import load_model
    from mmtp_jax.sampling.params import SamplingParams

    loaded = load_model(engine_config(str(model), None, **OPTIONS))
    core = EngineCore(
        loaded.config, loaded.graph, loaded.params, max_model_len=loaded.max_model_len
    )
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0)
    measured = []
    for round_ in range(ROUNDS + 1):
        for index in range(CLIENTS):
            core.add(f"{round_}-{index}", [5 + index % 50, 7], params, 0)
        steps, begin = core.stats.steps, time.perf_counter()
        while core.has_work:
            core.step()
        measured.append(1e3 * (time.perf_counter() - begin) / (core.stats.steps - steps))
    return measured[1:]


def main() -> None:
    from models_for_tests import write_tiny_llama
    from server.running import running

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_llama(Path(folder), tokenizer=True, max_position_embeddings=4096)
        rounds: dict[str, list[tuple[float, float, int]]] = {"whole": [], "stream": []}
        with running(model, *flags) as server:
            served(server, stream=True)
            for _ in range(ROUNDS):
                for name, measured in rounds.items():
                    measured.append(served(server, stream=name == "stream"))
        core = alone(model)
    report: dict[str, Any] = {
        "clients": CLIENTS,
        "tokens_each": TOKENS,
        "cores": os.cpu_count(),
        "core_alone_ms_per_step": round(statistics.median(core), 4),
    }
    for name, measured in rounds.items():
        report[name] = {
            "engine_ms_per_step": round(statistics.median(one[0] for one in measured), 4),
            "engine_ms_per_step_rounds": [round(one[0], 4) for one in measured],
            "seconds_to_last_byte": round(statistics.median(one[1] for one in measured), 3),
            "events": measured[0][2],
        }
    # Round by round: the machine's speed drifts by more than what is measured.
    pairs = zip(rounds["stream"], rounds["whole"], strict=True)
    ratios = sorted(round(stream[0] / whole[0], 4) for stream, whole in pairs)
    report["stream_over_whole"] = statistics.median(ratios)
    report["stream_over_whole_rounds"] = ratios
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
