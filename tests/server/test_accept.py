"""How new connections are taken."""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from typing import Any, cast

import pytest
import uvloop

from mmtp_jax.server import accept
from mmtp_jax.server.accept import Acceptor

CLIENTS = 50
ROUNDS = 10


class Echo(asyncio.Protocol):
    """Sends back what it gets. `made` are those that there are."""

    def __init__(self, made: list[Echo]) -> None:
        made.append(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are none

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=128) as made:
        yield made


@pytest.fixture(params=[asyncio.run, uvloop.run])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    found: Callable[[Coroutine[Any, Any, None]], None] = request.param
    return found


def connected(listener: socket.socket, stack: ExitStack, count: int) -> list[socket.socket]:
    address = listener.getsockname()
    return [
        stack.enter_context(socket.create_connection(address, timeout=10)) for _ in range(count)
    ]


def test_all_that_wait_are_taken_at_once(
    listener: socket.socket, run: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    """uvloop alone takes one in each round of its loop."""
    made: list[Echo] = []

    async def main() -> None:
        with ExitStack() as stack:
            clients = connected(listener, stack, CLIENTS)
            acceptor = Acceptor(listener, functools.partial(Echo, made))
            for _ in range(ROUNDS):
                await asyncio.sleep(0)
            assert len(made) == CLIENTS
            for number, client in enumerate(clients):
                await asyncio.to_thread(client.sendall, b"%d" % number)
                assert await asyncio.to_thread(client.recv, 10) == b"%d" % number
            sockets = [one.transport.get_extra_info("socket") for one in made]
            assert all(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in sockets)
            acceptor.close()
            connected(listener, stack, 1)
            await asyncio.sleep(0.01)
            assert len(made) == CLIENTS
            for one in made:
                one.transport.abort()

    run(main())


class Exhausted(socket.socket):
    """A listening socket of a process that has no descriptors left, a few times."""

    times = 2

    def accept(self) -> tuple[socket.socket, Any]:
        if self.times > 0:
            self.times -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_connections_wait_where_descriptors_are_exhausted(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    monkeypatch.setattr(accept, "RETRY_SECONDS", 0.01)
    made: list[Echo] = []

    async def main() -> None:
        with Exhausted() as listener, ExitStack() as stack:
            listener.bind(("127.0.0.1", 0))
            listener.listen(8)
            connected(listener, stack, 1)
            acceptor = Acceptor(listener, functools.partial(Echo, made))
            async with asyncio.timeout(10):
                while not made:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.01)
            assert listener.times == 0
            acceptor.close()
            await asyncio.sleep(0.01)
            made[0].transport.abort()

    with caplog.at_level(logging.WARNING):
        run(main())
    assert [one.getMessage() for one in caplog.records] == [
        "cannot accept a connection: Too many open files"
    ] * 2
