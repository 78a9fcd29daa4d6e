"""What answers look like: usage, and the models that the OpenAPI document shows.

Answers are built as plain dicts and encoded once: a stream sends one for every few tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel

from mmtp_jax.server.errors import ErrorResponse
from mmtp_jax.server.generation import Choice

_REASONS = {
    400: "A field of the request is wrong; `param` names it.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    409: "Another request of this kind is being served, or none is.",
    413: "The body is larger than the server accepts.",
    429: "Too many requests are waiting.",
    500: "The server failed.",
    503: "The engine is starting or stopping.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": text} for status, text in _REASONS.items()
}
STREAMED: dict[int | str, dict[str, Any]] = ERRORS | {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
}

FinishReason = Literal["stop", "length", "abort", "tool_calls"]


class PromptTokensDetails(BaseModel):
    """Prompt tokens that were found in the prefix cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of the prompts and of all their samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    """Lists over the tokens whose text is in the choice's."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptLogprob(BaseModel):
    """One candidate for a position of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str


class CompletionChoice(BaseModel):
    """One sample. `stop_reason` is the stop string or token id that ended it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None


class Completion(BaseModel):
    """The answer of `/v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(BaseModel):
    """A candidate for a token's place."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """The tokens of a message."""

    content: list[ChatLogprob]


class AnsweredFunction(BaseModel):
    """The function to call; `arguments` is JSON text."""

    name: str
    arguments: str


class AnsweredToolCall(BaseModel):
    """A call the model asks for."""

    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AnsweredMessage(BaseModel):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[AnsweredToolCall] | None = None


class ChatChoice(BaseModel):
    """One sample. `stop_reason` is the stop string or token id that ended it."""

    index: int
    message: AnsweredMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None


class ChatCompletion(BaseModel):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None


class ModelCard(BaseModel):
    """A name this server answers to."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(BaseModel):
    """The answer of `/v1/models`."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(BaseModel):
    """The answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    """The answer of `/detokenize`."""

    prompt: str


class Version(BaseModel):
    """The answer of `/version`."""

    version: str


class Health(BaseModel):
    """The answer of `/health` while the engine takes requests."""

    status: Literal["ok"]


def usage(choices: Iterable[Choice], *, only_prompt: bool = False) -> dict[str, Any]:
    """The usage so far: every prompt counts once, every sample's tokens count."""
    lengths: dict[int, int] = {}
    cached: dict[int, int] = {}
    tokens = 0
    for choice in choices:
        key = id(choice.prompt)
        lengths[key] = len(choice.prompt.token_ids)
        cached[key] = max(cached.get(key, 0), choice.sample.num_cached_tokens)
        tokens += 0 if only_prompt else len(choice.sample.token_ids)
    prompt_tokens = sum(lengths.values())
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
    }
