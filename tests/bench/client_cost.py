"""Run by hand: what a chunk costs the client of `bench serving`.

A process streams canned chunks to 64 clients of another one, a chunk to each at regular times that
leave the client some rest, so that it reads most of them one by one as it would from a server. The
figure is the client's CPU time.

    python tests/bench/client_cost.py
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT)]

STREAMS = 64
CHUNKS = 2000
TICK_SECONDS = 0.002
EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":'
    b'1764500000,"model":"smollm2-135m-instruct","choices":[{"index":0,"text":" word","logprobs":'
    b'null,"finish_reason":null}],"usage":{"prompt_tokens":17,"completion_tokens":%4d,'
    b'"total_tokens":1017,"prompt_tokens_details":{"cached_tokens":0}}}\n\n'
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def serve(ports: Any) -> None:
    writers: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writers.append(writer)

    async def main() -> None:
        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        ports.put(server.sockets[0].getsockname()[1])
        while len(writers) < STREAMS:
            await asyncio.sleep(0.01)
        chunks = [chunk(EVENT % number) for number in range(1, CHUNKS + 1)]
        for one in (HEAD, *chunks, chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"):
            for writer in writers:
                writer.write(one)
            await asyncio.sleep(TICK_SECONDS)
        for writer in writers:
            await writer.drain()
        await asyncio.sleep(1)

    uvloop.run(main())


def main() -> None:
    from mmtp_jax.bench.serving.connection import Answer, Client
    from mmtp_jax.bench.serving.events import measured
    from mmtp_jax.bench.serving.target import Target

    context = multiprocessing.get_context("spawn")
    ports = context.Queue()
    process = context.Process(target=serve, args=(ports,), daemon=True)
    process.start()
    target = Target.of(f"http://127.0.0.1:{ports.get()}", None)
    answers = [Answer() for _ in range(STREAMS)]

    async def ask() -> None:
        client = Client(target, 600)
        request = target.post("/v1/completions") + b"0\r\n\r\n"
        await asyncio.gather(*(client.ask(request, answer) for answer in answers))

    begin, cpu = time.perf_counter(), time.process_time()
    uvloop.run(ask())
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    reads = sum(len(answer.times) for answer in answers)
    events = STREAMS * CHUNKS
    begin = time.process_time()
    tokens = sum(measured(answer).output_tokens for answer in answers)
    parsing = time.process_time() - begin
    assert tokens == events, [answer.failure for answer in answers]
    print(f"{events} events in {reads} reads within {seconds:.1f} s")
    print(f"{1e6 * cpu / reads:.1f} us of CPU per read, {1e6 * cpu / events:.1f} us per event")
    print(f"afterwards {1e6 * parsing / events:.1f} us per event")


if __name__ == "__main__":
    main()
