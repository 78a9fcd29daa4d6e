"""Prompts that the target writes itself.

A model that was trained on conversations has seen users' messages too: where one begins, it goes on
with what it expects to be asked (Magpie, arXiv 2406.08464). So nobody has to collect prompts to
train modules for a model, and what they see is as broad as what the model knows.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from mmtp_jax.config import ConfigError, require
from mmtp_jax.loader import LoadedModel
from mmtp_jax.prompt_files import JSON_LINES
from mmtp_jax.prompts import Messages
from mmtp_jax.sampling.params import GREEDY_BELOW
from mmtp_jax.tokenizer import REPLACEMENT, ChatTemplateError, Tokenizer
from mmtp_jax.train.generate import draw
from mmtp_jax.train.samples import GenerateOptions
from mmtp_jax.train.shards import Dataset, write_whole
from mmtp_jax.weights.errors import ModelError

# As many words in a row make a prompt that of an evaluation set (as for GPT-3, arXiv 2005.14165,
# appendix C).
SHARED_WORDS = 13

_MESSAGE = "the-message-of-the-user"


@dataclass
class OwnPrompts:
    """The prompts that were kept, and how many were dropped for which reason."""

    texts: list[str] = field(default_factory=list)
    unfinished: int = 0
    unusable: int = 0
    repeated: int = 0
    excluded: int = 0


def write_own_prompts(
    loaded: LoadedModel,
    path: Path,
    options: GenerateOptions,
    exclude: Iterable[Messages] = (),
    *,
    progress: bool = False,
) -> OwnPrompts:
    """Let the model write users' messages, `options.samples` at each temperature, and keep the good
    ones in `path`, a line with a field "prompt" for each.

    Dropped are messages that do not end within `options.max_tokens`, without text or with special
    tokens inside, repeated ones, and those that share `SHARED_WORDS` words in a row with the last
    message of a conversation of `exclude`. A run that was interrupted goes on where it was.

    Raises `ConfigError` if `path` is no JSON lines file or cannot be written, or for options that
    do not fit the model; `ModelError` for a model without a tokenizer; `ChatTemplateError`.
    """
    require(
        path.name.endswith(JSON_LINES),
        f"the file of prompts must end in {' or '.join(JSON_LINES)}, got {path}",
    )
    lowest = min(options.temperatures)
    require(lowest >= GREEDY_BELOW, f"temperatures must be above 0 to write prompts, got {lowest}")
    if loaded.tokenizer is None:
        raise ModelError(f"{loaded.config.model} has no tokenizer, so it cannot write text")
    opening, ending = _turn(loaded.tokenizer)
    drawn = path.with_name(f"{path.name}.drawn")
    options = replace(options, max_prompt_len=len(opening))
    draw(loaded, [np.array(opening, np.int32)], drawn, options, progress=progress)
    ends = set(loaded.graph.config.eos_token_ids)
    messages = _messages(Dataset.open(drawn), loaded.tokenizer, ends, ending)
    kept = _keep(messages, loaded.tokenizer, exclude)
    lines = "".join(json.dumps({"prompt": text}) + "\n" for text in kept.texts).encode()
    content = gzip.compress(lines) if path.suffix == ".gz" else lines
    try:
        write_whole(path, lambda file: file.write(content))
    except OSError as error:
        raise ConfigError(f"cannot write prompts to {path}: {error}") from None
    shutil.rmtree(drawn)
    return kept


def _turn(tokenizer: Tokenizer) -> tuple[list[int], str]:
    """The token ids up to where a first message of a user begins, and the text that follows one."""
    chat = tokenizer.apply_chat_template([{"role": "user", "content": _MESSAGE}])
    before, found, after = chat.partition(_MESSAGE)
    if not found or not before.strip():
        raise ChatTemplateError(
            "the chat template must show the message of a user, and something before it"
        )
    # The space before a word belongs to the word's token.
    opening = tokenizer.encode(before.rstrip(" "), add_special_tokens=False)
    return opening, next(iter(after.split()), "")


def _messages(
    data: Dataset, tokenizer: Tokenizer, ends: set[int], ending: str
) -> Iterator[str | None]:
    """The text of every sample; None of one that did not end."""
    for index, prompt_length in enumerate(data.prompt_lengths.tolist()):
        ids = data.tokens(index)[prompt_length:].tolist()
        complete = ids[-1] in ends
        text = tokenizer.decode(ids[:-1] if complete else ids, skip_special_tokens=False)
        before, found, _ = text.partition(ending) if ending else (text, "", "")
        yield before.strip() if complete or found else None


def _keep(
    messages: Iterable[str | None], tokenizer: Tokenizer, exclude: Iterable[Messages]
) -> OwnPrompts:
    seen: set[str] = set()
    shared = {words for messages in exclude for words in _in_a_row(messages[-1]["content"])}
    kept = OwnPrompts()
    for text in messages:
        if text is None:
            kept.unfinished += 1
        elif not text or REPLACEMENT in text or _has_special(tokenizer, text):
            kept.unusable += 1
        elif text in seen:
            kept.repeated += 1
        elif not shared.isdisjoint(_in_a_row(text)):
            kept.excluded += 1
        else:
            seen.add(text)
            kept.texts.append(text)
    return kept


def _has_special(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a chat template would take a part of the text for its own."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.decode(ids) != tokenizer.decode(ids, skip_special_tokens=False)


def _in_a_row(text: str) -> Iterator[tuple[str, ...]]:
    """Every `SHARED_WORDS` words in a row, in lower case."""
    words = text.lower().split()
    return zip(*(words[first:] for first in range(SHARED_WORDS)), strict=False)
