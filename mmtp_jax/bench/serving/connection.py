"""Requests over HTTP/1.1 that keep every byte of the answer and when it came.

Nothing is looked at while answers come: for each read the clock is read, a parser in C (httptools,
that of uvicorn) takes the chunked body apart, and what it finds is appended to a buffer. On a core
of an AMD EPYC (Zen 4) that costs about 8 us per chunk (`tests/bench/client_cost.py`); lines read
through httpx took 70.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from dataclasses import dataclass, field
from typing import cast

import httptools

from mmtp_jax.bench.serving.target import Target, reason

# Servers close connections that are idle for some seconds (uvicorn: 5); a request that crosses the
# closing would fail.
IDLE_SECONDS = 1.0


@dataclass(slots=True)
class Answer:
    """One request's answer; times are of `time.perf_counter`, which all processes share.

    `times[i]` is when the body had come up to byte `ends[i]`. `connect_seconds`: what opening a
    connection took before `begin`, when the request was written. `failure`: why there is no whole
    answer. `status` 0: none came.
    """

    begin: float = 0.0
    connect_seconds: float = 0.0
    status: int = 0
    content_type: bytes = b""
    body: bytearray = field(default_factory=bytearray)
    times: array[float] = field(default_factory=lambda: array("d"))
    ends: array[int] = field(default_factory=lambda: array("q"))
    end: float = 0.0
    failure: str | None = None


class Connection(asyncio.Protocol):
    """One request at a time. `open`: another one can be sent."""

    def __init__(self) -> None:
        self.open = False
        self.idle_since = 0.0
        self._answer = Answer()
        self._done: asyncio.Future[None] | None = None

    async def ask(self, request: bytes, answer: Answer) -> None:
        """Send a request and fill its answer. Raises `OSError` if none comes."""
        self._answer = answer
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        answer.begin = time.perf_counter()
        self._transport.write(request)
        await self._done
        self.idle_since = answer.end

    def close(self) -> None:
        self.open = False
        self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.open = True

    def data_received(self, data: bytes) -> None:
        now, answer = time.perf_counter(), self._answer
        size = len(answer.body)
        answer.end = now
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(OSError(f"the answer is not HTTP ({type(error).__name__})"))
            self.close()
        if len(answer.body) != size:
            answer.times.append(now)
            answer.ends.append(len(answer.body))

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        if error is None and self._answer.status:
            # What has no length ends so; whoever reads the events sees whether the last one came.
            self._end(None)
        else:
            self._end(OSError("the answer broke off" if self._answer.status else "no answer came"))

    # What httptools calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._answer.content_type = value.lower()

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._answer.body += body

    def on_message_complete(self) -> None:
        if self._answer.status // 100 == 1:
            return  # 100 and 103 come before the answer
        self.open = self.open and self._parser.should_keep_alive()
        self._end(None)
        # What comes unasked, such as a 408 before an idle connection is closed, is nobody's.
        self._answer = Answer()

    def _end(self, error: OSError | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)


class Client:
    """Connections to one server, each used again while the server keeps it open."""

    def __init__(self, target: Target, timeout: float) -> None:
        self._target = target
        self._tls = target.tls
        self._timeout = timeout
        self._idle: list[Connection] = []

    async def ask(self, request: bytes, answer: Answer) -> None:
        """Fill a request's answer; what goes wrong is its `failure`."""
        connection = None
        try:
            async with asyncio.timeout(self._timeout):
                connection = await self._connection(answer)
                await connection.ask(request, answer)
            self._idle.append(connection)
            connection = None
        except TimeoutError:
            answer.failure = f"timed out after {self._timeout:g} s"
        except OSError as error:
            why = reason(error)
            answer.failure = f"cannot connect: {why}" if connection is None else why
        finally:
            answer.end = answer.end or time.perf_counter()
            if connection is not None:
                connection.close()

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connection(self, answer: Answer) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.open and time.perf_counter() - connection.idle_since < IDLE_SECONDS:
                return connection
            connection.close()
        begin = time.perf_counter()
        loop = asyncio.get_running_loop()
        host, port = self._target.host, self._target.port
        _, connection = await loop.create_connection(Connection, host, port, ssl=self._tls)
        answer.connect_seconds = time.perf_counter() - begin
        return connection
