"""The bodies of requests, each made from its number, so that any process can make any of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmtp_jax.bench.serving.options import ServingOptions
from mmtp_jax.config import ConfigError
from mmtp_jax.prompt_files import read_prompts
from mmtp_jax.prompts import Messages

# vLLM's option: the usage so far comes with every chunk, which tells the tokens in it.
STREAM_OPTIONS = {"include_usage": True, "continuous_usage_stats": True}


@dataclass(frozen=True)
class TextBodies:
    """The prompts of a file in an order of their own, again and again; every run has the same."""

    texts: list[bytes]

    def body(self, run: int, index: int) -> bytes:
        """Request `index` of a run; those of a warm-up are below 0."""
        return self.texts[index % len(self.texts)]


@dataclass(frozen=True)
class RandomBodies:
    """Token ids that no other request has, so that nothing of a prompt is in a cache.

    `fields`: the other fields as JSON, without the closing brace.
    """

    fields: bytes
    lengths: tuple[int, int]
    ids: tuple[int, int]
    seed: int

    def body(self, run: int, index: int) -> bytes:
        """Request `index` of a run; those of a warm-up are below 0."""
        rng = np.random.default_rng((self.seed, run, index % 2**32))
        length = rng.integers(*self.lengths, endpoint=True)
        ids = rng.integers(*self.ids, length, endpoint=True)
        return self.fields + b', "prompt": [' + ",".join(map(str, ids.tolist())).encode() + b"]}"


type Bodies = TextBodies | RandomBodies


def bodies(options: ServingOptions, model: str) -> Bodies:
    """Raises `ConfigError` for a dataset that cannot be read, or not for this endpoint."""
    fields: dict[str, Any] = {
        "model": model,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": STREAM_OPTIONS,
    }
    if options.ignore_eos:
        fields["ignore_eos"] = True
    fields |= options.extra_body
    if options.dataset is None:
        lengths, ids = options.random_input_len, options.random_ids
        return RandomBodies(
            json.dumps(fields)[:-1].encode(),
            (lengths[0], lengths[-1]),
            (ids[0], ids[-1]),
            options.seed,
        )
    conversations = read_prompts(options.dataset)
    order = np.random.default_rng(options.seed).permutation(len(conversations))
    texts = []
    for index in order.tolist():
        if options.asked_endpoint == "chat":
            prompt: dict[str, Any] = {"messages": conversations[index]}
        else:
            prompt = {"prompt": _only_text(conversations[index])}
        texts.append(json.dumps(fields | prompt).encode())
    return TextBodies(texts)


def _only_text(conversation: Messages) -> str:
    if len(conversation) != 1:
        raise ConfigError(
            "--endpoint completions takes prompts of one message, but a conversation of --dataset"
            f" has {len(conversation)}"
        )
    return str(conversation[0]["content"])
