"""Run by hand: what requests, chunks and tokens cost the HTTP process.

It serves here, over a process that stands for the engine and gives every request so many tokens of
a text in each step. Clients are raw sockets in another process. The figures are CPU time of this
process. Steps leave it some rest, so that every chunk carries the tokens of one step, unless
`--tick 0` lets it fall behind.

    python tests/bench/server_cost.py [--tick SECONDS] [--profile]
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import functools
import json
import multiprocessing
import os
import pstats
import socket
import statistics
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import uvloop

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT)]

CLIENTS = 256
STEPS = 40
TICK_SECONDS = 0.04
READ_SECONDS = 0.01
ROUNDS = 3
REQUESTS = 4  # in turn on each connection
TEXT = (
    "Gravity is the force by which a planet or other body draws objects toward its center. The"
    " force of gravity keeps all of the planets in orbit around the sun, and it is what makes"
    " things fall: “anything that has mass also has gravity”, as 17 textbooks say.\n"
)
QUESTION = "What is gravity, and why does it keep the planets in their orbits around the sun?"


def engine(tick: float, config: Any, address: str, log_level: str, json_logs: bool) -> None:
    """In the place of `run_engine`: a request's seed is how many tokens it gets in a step."""
    from mmtp_jax.engine.delta import TokenDelta
    from mmtp_jax.server.engine_process import Channel
    from mmtp_jax.server.messages import AddRequest, Loaded, Ready, Shutdown, Snapshot, Step
    from mmtp_jax.server.run import _load_tokenizer

    tokenizer = _load_tokenizer(config, None)
    assert tokenizer is not None
    text = tokenizer.encode(TEXT)
    channel = Channel(address)
    channel.send(Loaded(tokenizer.vocab_size, (2,), 8, 8192, CLIENTS, "a stand-in"))
    channel.send(Ready())
    open_: dict[str, list[int]] = {}  # tokens of a step, tokens left, place in the text
    while (messages := channel.receive(0 if open_ else None)) is not None:
        for message in messages:
            if isinstance(message, Shutdown):
                return channel.close()
            assert isinstance(message, AddRequest)
            open_[message.request_id] = [message.seed, message.params["max_tokens"], 0]
        deltas = []
        streams = any(each > 0 for each, _, _ in open_.values())
        if streams and len(open_) < CLIENTS and not any(place for _, _, place in open_.values()):
            continue  # all begin together
        for request_id, (each, left, place) in list(open_.items()):
            count = min(max(each, 1), left)
            tokens = tuple(text[(place + i) % len(text)] for i in range(count))
            open_[request_id] = [each, left - count, place + count]
            reason = None
            if left == count:
                reason = "length"
                del open_[request_id]
            deltas.append(
                TokenDelta(request_id, tokens, count - 1, count - 1, 0, reason, None)  # type: ignore[arg-type]
            )
        channel.send(Step(tuple(deltas), Snapshot(running=len(open_)), 0.001))
        if streams:
            time.sleep(tick)


def ask(port: int, body: dict[str, Any], times: int) -> int:
    """Send a request on every connection, so many times in turn; the events that came."""
    content = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
    end = b"0\r\n\r\n" if body["stream"] else b"null}"
    left: dict[socket.socket, int] = {}
    for _ in range(CLIENTS):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setblocking(False)
        connection.send(request)
        left[connection] = times
    events = 0
    while left:
        # A client that slept until something comes would be woken, here on one of two cores, by
        # every single chunk.
        time.sleep(READ_SECONDS)
        for connection in list(left):
            try:
                got = connection.recv(1 << 20)
            except BlockingIOError:
                continue
            assert got, "the connection was closed"
            events += got.count(b"data: ")
            if got.endswith(end):
                left[connection] -= 1
                if left[connection]:
                    connection.send(request)
                else:
                    connection.close()
                    del left[connection]
    return events


def clients(port: int, connection: Any) -> None:
    """Answers each (body, times) with the events that came, until None comes."""
    while (given := connection.recv()) is not None:
        connection.send(ask(port, *given))


class Measured:
    """The clients, and what this process spends on them."""

    def __init__(self, port: int, profile: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=clients, args=(port, other), daemon=True)
        self._process.start()
        self._profile = profile

    async def cpu(self, times: int, **fields: Any) -> tuple[float, int]:
        """A request on every connection, so many times in turn: seconds of CPU, and events."""
        body = {"messages": [{"role": "user", "content": QUESTION}], "stream": False} | fields
        profile = cProfile.Profile()
        begin = os.times()
        if self._profile:
            profile.enable()
        self._connection.send((body, times))
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        loop.add_reader(self._connection, lambda: done.done() or done.set_result(None))
        await done
        loop.remove_reader(self._connection)
        events = self._connection.recv()
        if self._profile:
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(35)
        user, system = (end - start for end, start in zip(os.times()[:2], begin, strict=False))
        print(
            f"  {fields} x {times}: {user:.2f} + {system:.2f} s of CPU, {events} events", flush=True
        )
        return user + system, events

    async def request(self, stream: bool) -> float:
        """Seconds of CPU for a request of one token."""
        found = [
            await self.cpu(REQUESTS, seed=0, max_tokens=1, stream=stream) for _ in range(ROUNDS)
        ]
        return statistics.median(seconds for seconds, _ in found) / (REQUESTS * CLIENTS)

    async def stream(self, each: int) -> tuple[float, float]:
        """Seconds of CPU for a chunk, and for a token, of steps that bring so many tokens."""
        found, events = [], []
        for _ in range(ROUNDS):
            short, long = [
                await self.cpu(1, stream=True, seed=each, max_tokens=each * steps)
                for steps in (STEPS, 3 * STEPS)
            ]
            found.append(long[0] - short[0])
            events.append(long[1] - short[1])
        seconds = statistics.median(found)
        return seconds / statistics.median(events), seconds / (2 * STEPS * CLIENTS * each)

    def close(self) -> None:
        self._connection.send(None)
        self._process.join()


def ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
            return True
    except urllib.error.HTTPError:
        return False


async def measure(port: int, profile: bool) -> None:
    measured = Measured(port, profile)
    await measured.cpu(1, seed=0, max_tokens=1)
    request, streamed = [await measured.request(stream) for stream in (False, True)]
    chunks = {each: await measured.stream(each) for each in (1, 8)}
    print(f"a request of one token {1e6 * request:.0f} us, streamed {1e6 * streamed:.0f} us")
    for each, (chunk, token) in chunks.items():
        print(f"steps of {each}: a chunk {1e6 * chunk:.1f} us, a token {1e6 * token:.2f} us")
    measured.close()


async def main() -> None:
    from mmtp_jax.config import engine_config
    from mmtp_jax.server import engine_client, run
    from mmtp_jax.weights.resolve import DEFAULT_MODEL

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tick", type=float, default=TICK_SECONDS, help="seconds between steps")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    engine_client.run_engine = functools.partial(engine, arguments.tick)
    run.configure_logging("warning", False)
    config = engine_config(DEFAULT_MODEL, None)
    with run._listen("127.0.0.1", 0) as listener:
        server = run._Server(config, run.ServerConfig(), listener)
        serving = asyncio.create_task(server.run())
        port = listener.getsockname()[1]
        while not await asyncio.to_thread(ready, port):
            await asyncio.sleep(0.2)
        await measure(port, arguments.profile)
        server._signalled()
        await serving


if __name__ == "__main__":
    uvloop.run(main())
