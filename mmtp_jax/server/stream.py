"""Server-sent events, and noticing that a client has gone away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mmtp_jax.server.errors import APIError

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"

# JSON, as bytes.
encoded = msgspec.json.Encoder().encode


class ClientGone(Exception):
    """Nobody is left to answer."""


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encoded(data) + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_gone[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client goes away (`ClientGone` then)."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.wait({task, gone})


class EventStream(Response):
    """Sends what a generator yields, each as one chunk; errors become an event.

    The status goes out with the first chunk, so an `APIError` before it is an ordinary answer. The
    generator is closed as soon as the client goes away.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):
            await until_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with contextlib.aclosing(self._chunks) as chunks:
            first = await anext(chunks)
            start = {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
            await send(start)
            await send({"type": "http.response.body", "body": first, "more_body": True})
            try:
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except APIError as error:
                await self._fail(send, error)
            except (OSError, asyncio.CancelledError):
                raise
            except Exception:
                logger.exception("a stream failed")
                await self._fail(send, APIError(500, "the stream failed"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _fail(self, send: Send, error: APIError) -> None:
        body = event(error.body) + DONE
        await send({"type": "http.response.body", "body": body, "more_body": True})
