"""What the engine reports of a request: the tokens that one step added to it."""

from __future__ import annotations

from dataclasses import dataclass

from mmtp_jax.engine.request import FinishReason


@dataclass(frozen=True)
class TokenLogprobs:
    """One token's log-probability and the best alternatives, from the raw logits."""

    chosen: float
    top_ids: tuple[int, ...]
    top_values: tuple[float, ...]


@dataclass(frozen=True)
class TokenDelta:
    """What one step added to one request. `drafted`/`accepted` count the drafts it verified.

    `logprobs` has one entry per token if the request asked for them. `prompt_logprobs` comes with
    the request's first tokens, if asked for: one entry per prompt token but the first.
    """

    request_id: str
    token_ids: tuple[int, ...]
    drafted: int
    accepted: int
    num_cached_tokens: int
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] | None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
