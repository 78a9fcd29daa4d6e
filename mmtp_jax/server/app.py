"""The FastAPI application: its endpoints, and how errors are answered."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

import mmtp_jax
from mmtp_jax.server import chat, completions, management, profiling
from mmtp_jax.server.errors import APIError, bad_request
from mmtp_jax.server.limits import APIKey, BodyLimit, error_response
from mmtp_jax.server.service import Service
from mmtp_jax.server.stream import ClientGone


def create_app(service: Service, *, api_key: str | None, max_body_bytes: int) -> FastAPI:
    """The application over a running engine."""
    app = FastAPI(
        title="mmtp_jax",
        version=mmtp_jax.__version__,
        summary="An OpenAI-compatible server for models with MTP modules.",
    )
    app.state.service = service
    for module in (completions, chat, management):
        app.include_router(module.router)
    if service.profile_directory is not None:
        app.include_router(profiling.router)

    def answer(error: APIError) -> Response:
        service.metrics.http_error(error.status)
        return error_response(error)

    @app.exception_handler(APIError)
    async def refused(request: Request, error: APIError) -> Response:
        return answer(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return answer(_validation_error(error.errors()))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        response = answer(APIError(error.status_code, str(error.detail)))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientGone)
    async def gone(request: Request, error: ClientGone) -> Response:
        # Nobody reads it; 499 is what the log shows.
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return answer(APIError(500, "the server failed to answer this request"))

    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    if api_key is not None:
        app.add_middleware(APIKey, key=api_key, on_refusal=lambda: service.metrics.http_error(401))
    _document_errors(app)
    return app


def _validation_error(errors: Any) -> APIError:
    """The first field that is wrong, with everything that is wrong with it."""
    first = errors[0]
    # ("body", field, ...): deeper places are alternatives of a union, or inside of the field.
    field = first["loc"][1] if len(first["loc"]) > 1 else None
    if first["type"] == "json_invalid":
        return bad_request(f"the body is not valid JSON: {first['ctx']['error']}")
    if not isinstance(field, str):
        return bad_request(f"the body: {first['msg']}")
    same = [error for error in errors if error["loc"][1:2] == (field,)]
    messages = dict.fromkeys(_message(error) for error in same)
    return bad_request(f"{field}: {' or '.join(messages)}", field)


def _message(error: Any) -> str:
    inner = [str(part) for part in error["loc"][2:] if isinstance(part, int)]
    place = f" (at index {inner[-1]})" if inner else ""
    return f"{error['msg']}{place}"


def _document_errors(app: FastAPI) -> None:
    """Show in the OpenAPI document that a wrong field is answered with 400, not FastAPI's 422."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        schema = make()
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
