"""What the engine reports of a request: the tokens that one step added to it.

Structs of msgspec, because a server's engine sends them to another process after every step.
"""

from __future__ import annotations

import msgspec

from mmtp_jax.engine.request import FinishReason


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One token's log-probability and the best alternatives, from the raw logits."""

    chosen: float
    top_ids: tuple[int, ...]
    top_values: tuple[float, ...]


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step added to one request. `drafted`/`accepted` count the drafts it verified.

    It ends with "error" where the request's grammar could not go on: its tokens may not fit then.
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
