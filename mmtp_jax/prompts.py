"""What callers pass as prompts, conversations and parameters, checked at the door."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mmtp_jax.config import require
from mmtp_jax.sampling.params import SamplingParams

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


def as_batch(prompts: object) -> list[Prompt]:
    """One prompt or several as a list; `ConfigError` if they are anything else."""
    if isinstance(prompts, str):
        return [prompts]
    require(
        isinstance(prompts, Sequence) and not isinstance(prompts, bytes),
        f"prompts must be a string, a list of token ids or a list of these,"
        f" got {reprlib.repr(prompts)}",
    )
    assert isinstance(prompts, Sequence)
    if prompts and not any(isinstance(prompt, Sequence) for prompt in prompts):
        return [checked_ids(prompts)]
    return [prompt if isinstance(prompt, str) else checked_ids(prompt) for prompt in prompts]


def as_conversations(messages: object) -> list[Messages]:
    """One conversation or several as a list; `ConfigError` if they are anything else."""
    require(
        isinstance(messages, Sequence) and not isinstance(messages, (str, bytes)),
        f"messages must be a list of messages or a list of such lists,"
        f" got {reprlib.repr(messages)}",
    )
    assert isinstance(messages, Sequence)
    conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
    for conversation in conversations:
        require(
            isinstance(conversation, Sequence)
            and all(isinstance(message, Mapping) for message in conversation),
            'a message must be a mapping such as {"role": "user", "content": "Hello"},'
            f" got {reprlib.repr(conversation)}",
        )
    return list(conversations)


def per_prompt(params: object, count: int) -> list[SamplingParams]:
    """Parameters for each of `count` prompts; `ConfigError` if they are something else."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    require(
        isinstance(params, Sequence) and all(isinstance(one, SamplingParams) for one in params),
        f"sampling_params must be SamplingParams or a list of them, got {reprlib.repr(params)}",
    )
    assert isinstance(params, Sequence)
    require(len(params) == count, f"{len(params)} sampling_params for {count} prompts")
    return list(params)


def checked_ids(prompt: object) -> list[int]:
    """A prompt's token ids as plain integers; `ConfigError` if it is anything else."""
    require(
        isinstance(prompt, Sequence)
        and not isinstance(prompt, (str, bytes))
        and all(
            isinstance(token, (int, np.integer)) and not isinstance(token, bool) for token in prompt
        ),
        f"a prompt must be a string or a list of token ids, got {reprlib.repr(prompt)}",
    )
    assert isinstance(prompt, Sequence)
    return [int(token) for token in prompt]
