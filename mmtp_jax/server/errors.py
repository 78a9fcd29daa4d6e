"""Errors as OpenAI's API words them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class ErrorInfo(BaseModel):
    """`param` names the field at fault, if one is; `code` is a word that programs can test."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorResponse(BaseModel):
    """The body of every answer whose status is 400 or more."""

    error: ErrorInfo


_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class APIError(Exception):
    """An answer with an error status. The message goes to the client."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers: dict[str, str] = {}

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        info = {
            "message": self.message,
            "type": _TYPES.get(self.status, kind),
            "param": self.param,
            "code": self.code,
        }
        return {"error": info}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> APIError:
    """The client's mistake."""
    return APIError(400, message, param=param, code=code)


class EngineStarting(APIError):
    """The engine is not ready yet."""

    def __init__(self, why: str) -> None:
        super().__init__(503, f"the engine is not ready: {why}", code="engine_starting")
        self.headers = {"Retry-After": "5"}


class EngineDead(APIError):
    """The engine's process ended; so will the server."""

    def __init__(self, why: str) -> None:
        super().__init__(500, f"the engine has stopped: {why}", code="engine_dead")


class ShuttingDown(APIError):
    """The server was told to stop."""

    def __init__(self) -> None:
        super().__init__(503, "the server is shutting down", code="shutting_down")


class Overloaded(APIError):
    """More requests wait than the server was told to hold."""

    def __init__(self, limit: int) -> None:
        message = f"more than {limit} requests are waiting (--max-waiting): try again later"
        super().__init__(429, message, code="overloaded")
        self.headers = {"Retry-After": "1"}
