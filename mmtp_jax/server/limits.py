"""ASGI middleware: the size of bodies, and who may ask."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmtp_jax.server.errors import APIError

# What monitoring asks without a key.
OPEN_PATHS = frozenset({"/health", "/metrics", "/version"})


def error_response(error: APIError) -> JSONResponse:
    """An error as an answer."""
    return JSONResponse(error.body, error.status, error.headers)


class BodyLimit:
    """Answers 413 to bodies of more than `max_bytes`, before they are read as far as it is
    known."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await error_response(self._error())(scope, receive, send)
            return
        seen, started, refused = 0, False, False

        async def counted() -> Message:
            nonlocal seen, refused
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_bytes and not started:
                refused = True
                raise self._error()
            return message

        async def watched(message: Message) -> None:
            nonlocal started
            if not refused:
                started = True
                await send(message)

        try:
            await self._app(scope, counted, watched)
        except APIError:
            if not refused:
                raise
        if refused:
            await error_response(self._error())(scope, receive, send)

    def _error(self) -> APIError:
        return APIError(413, f"the body must be at most {self._max_bytes} bytes", code="too_large")


class APIKey:
    """Answers 401 unless the key comes as `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, key: str, on_refusal: Callable[[], None]) -> None:
        self._app = app
        self._key = key.encode()
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            # Constant time: how long it takes says nothing about the key.
            right = secrets.compare_digest(given.strip(), self._key)
            if scheme.lower() != b"bearer" or not right:
                self._on_refusal()
                error = APIError(401, "the API key is missing or wrong", code="invalid_api_key")
                error.headers = {"WWW-Authenticate": "Bearer"}
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
