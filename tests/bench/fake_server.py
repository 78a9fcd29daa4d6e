"""A server that answers with canned chunks at once, or fails in the ways that servers do."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

DONE = b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 %d X\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def event(text: str, total: int | None, *, chat: bool) -> bytes:
    """One of a stream; `total` tokens so far, None: it does not say."""
    choice = {"delta": {"content": text}} if chat else {"text": text}
    data: dict[str, Any] = {"choices": [{"index": 0, "finish_reason": None} | choice]}
    if total is not None:
        data["usage"] = {"prompt_tokens": 7, "completion_tokens": total}
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    """As HTTP frames it."""
    return b"%x\r\n%s\r\n" % (len(data), data)


@dataclass
class Fake:
    """How it answers, and what it was asked.

    `usage`: "continuous", "last" or "none". `failure`: None, or one of `answer` (who knows HTTP
    copes with some). `prompts` and `paths` are of the POST requests; `connections` counts.
    """

    chunks: int = 4
    tokens_per_chunk: int = 3
    interval: float = 0.002
    usage: str = "continuous"
    failure: str | None = None
    metrics: list[str] = field(default_factory=list)
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    most_open: int = 0
    asked: threading.Event = field(default_factory=threading.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                method, path = head.decode().split(" ")[:2]
                if method == "GET":
                    writer.write(self.get(path))
                    continue
                length = re.search(rb"Content-Length: (\d+)", head)
                assert length is not None
                body = json.loads(await reader.readexactly(int(length[1])))
                self.heads.append(head)
                self.bodies.append(body)
                self.paths.append(path)
                self.open += 1
                self.most_open = max(self.most_open, self.open)
                self.asked.set()
                try:
                    await self.answer(writer, chat=path.endswith("/chat/completions"))
                finally:
                    self.open -= 1
                if self.failure == "breaks off":
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def get(self, path: str) -> bytes:
        status, body = 404, b"{}"
        if path.endswith("/v1/models"):
            status, body = 200, json.dumps({"data": [{"id": "fake"}]}).encode()
        if path.endswith("/metrics") and self.metrics:
            status, body = 200, self.metrics.pop(0).encode()
        return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)

    async def answer(self, writer: asyncio.StreamWriter, *, chat: bool) -> None:
        said = json.dumps({"error": {"message": "not today"}}).encode()
        if self.failure == "status":
            writer.write(HEAD % (503, b"application/json") + chunk(said) + END)
            return
        if self.failure == "no stream":
            writer.write(HEAD % (200, b"application/json") + chunk(b"{}") + END)
            return
        if self.failure == "no HTTP":
            writer.write(b"hello\r\n")
            return
        if self.failure == "early hints":
            writer.write(b"HTTP/1.1 103 X\r\n\r\n")
            await asyncio.sleep(self.interval)
        writer.write(HEAD % (200, b"text/event-stream; charset=utf-8"))
        if self.failure == "no tokens":
            writer.write(chunk(event("", 0, chat=chat) + DONE) + END)
            return
        for number in range(1, self.chunks + 1):
            await asyncio.sleep(self.interval)
            if self.failure == "breaks off" and number == 3:
                return
            if self.failure == "never ends" and number == 3:
                await asyncio.sleep(60)
            if self.failure == "error event" and number == 3:
                writer.write(chunk(b"data: " + said + b"\n\n" + DONE) + END)
                return
            if self.failure == "no JSON" and number == 3:
                writer.write(chunk(b"data: {no\n\n" + DONE) + END)
                return
            if self.failure == "deep JSON" and number == 3:
                deep = b"[" * 10_000 + b"]" * 10_000
                writer.write(chunk(b'data: {"x": ' + deep + b"}\n\n" + DONE) + END)
                return
            total = number * self.tokens_per_chunk if self.usage == "continuous" else None
            writer.write(chunk(event("abc", total, chat=chat)))
        if self.usage != "none":
            usage = {"prompt_tokens": 7, "completion_tokens": self.chunks * self.tokens_per_chunk}
            last = json.dumps({"choices": [], "usage": usage}).encode()
            writer.write(chunk(b"data: " + last + b"\n\n"))
        more = b"HTTP/1.1 408 X\r\nContent-Length: 4\r\n\r\nlate"
        writer.write(chunk(DONE) + END + more * (self.failure == "says more"))


@contextmanager
def faking(tls: ssl.SSLContext | None = None, **how: Any) -> Iterator[Fake]:
    """A fake server in a thread."""
    fake = Fake(**how)
    loop = asyncio.new_event_loop()
    ready = threading.Event()

    async def main() -> None:
        stop = asyncio.Event()
        server = await asyncio.start_server(fake.serve, "127.0.0.1", 0, ssl=tls)
        port = server.sockets[0].getsockname()[1]
        fake.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"
        stopping.append(stop)
        ready.set()
        await stop.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    stopping: list[asyncio.Event] = []
    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(stopping[0].set)
        thread.join(10)
        loop.close()
