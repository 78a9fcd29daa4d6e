"""The endpoints beside generation: models, health, metrics, version, and the tokenizer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

import mmtp_jax
from mmtp_jax.server.chat_prompt import chat_prompt
from mmtp_jax.server.errors import APIError, bad_request
from mmtp_jax.server.protocol import DetokenizeBody, TokenizeBody
from mmtp_jax.server.responses import (
    ERRORS,
    Detokenized,
    Health,
    ModelCard,
    ModelList,
    Tokenized,
    Version,
)
from mmtp_jax.server.service import Service, WithService

router = APIRouter()


@router.get("/health", response_model=Health, responses=ERRORS)
async def health(service: WithService) -> dict[str, Any]:
    """200 while the engine takes requests; 503 with the reason before, 500 after it died."""
    service.model()
    return {"status": "ok"}


@router.get("/v1/models", response_model=ModelList, responses=ERRORS)
async def models(service: WithService) -> dict[str, Any]:
    """The names this server answers to."""
    return {"object": "list", "data": [_card(service, name) for name in service.model_names]}


@router.get("/v1/models/{name:path}", response_model=ModelCard, responses=ERRORS)
async def model(name: str, service: WithService) -> dict[str, Any]:
    """One of the names this server answers to."""
    if name not in service.model_names:
        raise APIError(404, f"the model {name!r} does not exist", code="model_not_found")
    return _card(service, name)


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "mmtp_jax",
        "root": service.model_names[0],
        "max_model_len": service.model().max_model_len,
    }


@router.post("/tokenize", response_model=Tokenized, responses=ERRORS)
async def tokenize(body: TokenizeBody, service: WithService) -> dict[str, Any]:
    """Token ids of a text, or of messages in the chat template."""
    model = service.model()
    service.model_name(body)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    if body.prompt is not None:
        ids = service.encode(body.prompt, "prompt", body.add_special_tokens is not False)
    else:
        ids = chat_prompt(body, service).token_ids
    strings = None
    if body.return_token_strs:
        tokenizer = service.text_tokenizer()
        strings = [tokenizer.id_to_token(token) or "" for token in ids]
    return {
        "count": len(ids),
        "max_model_len": model.max_model_len,
        "tokens": ids,
        "token_strs": strings,
    }


@router.post("/detokenize", response_model=Detokenized, responses=ERRORS)
async def detokenize(body: DetokenizeBody, service: WithService) -> dict[str, Any]:
    """The text of token ids, special tokens included."""
    vocab_size = service.model().vocab_size
    service.model_name(body)
    for token in body.tokens:
        if token >= vocab_size:
            raise bad_request(f"tokens must be below {vocab_size}, got {token}", "tokens")
    return {"prompt": service.text_tokenizer().decode(body.tokens, skip_special_tokens=False)}


@router.get("/version", response_model=Version)
async def version() -> dict[str, str]:
    """The version of this server."""
    return {"version": mmtp_jax.__version__}


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(service: WithService) -> Response:
    """Prometheus metrics."""
    return Response(service.metrics.render(), media_type=service.metrics.content_type)
