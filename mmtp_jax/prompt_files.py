"""Reads files of prompts: a JSON object or a line of text for each. Imports no jax."""

from __future__ import annotations

import gzip
import itertools
import json
import reprlib
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mmtp_jax.config import ConfigError, require
from mmtp_jax.prompts import Messages

JSON_LINES = (".jsonl", ".jsonl.gz")
TEXT_LINES = (".txt", ".txt.gz")


def read_prompts(path: Path | str, limit: int | None = None) -> list[Messages]:
    """The first `limit` conversations of a file, in its order; lines without text are none.

    A line of a `.jsonl` file is an object with a field of `FIELDS`: "messages" as OpenAI's API
    takes them, "turns" of a user, of which the first is taken, or one user message as "prompt",
    "question" or "text". A line of a `.txt` file is one user message. Either may end in `.gz`.

    Raises `ConfigError` naming the file and the row, which is the number of the line.
    """
    path = Path(path)
    require(limit is None or limit >= 1, f"the limit of prompts must be >= 1, got {limit}")
    require(
        path.name.endswith(JSON_LINES + TEXT_LINES),
        f"a file of prompts must end in {', '.join(JSON_LINES + TEXT_LINES)}, got {path}",
    )
    parse = _conversation if path.name.endswith(JSON_LINES) else _user
    conversations = list(itertools.islice(_rows(path, parse), limit))
    require(bool(conversations), f"{path} holds no prompts")
    return conversations


def _rows(path: Path, parse: Callable[[str], Messages]) -> Iterator[Messages]:
    """What `parse` makes of every line that is not blank."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    if text := line.decode().strip():
                        yield parse(text)
                except (ValueError, RecursionError) as error:
                    raise ConfigError(f"row {number} of {path} {_reason(error)}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"cannot read the prompts of {path}: {error}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    return f"is not {'UTF-8' if isinstance(error, UnicodeDecodeError) else 'JSON'}: {error}"


def _conversation(line: str) -> Messages:
    row = json.loads(line)
    require(isinstance(row, dict), f"must be a JSON object, got {reprlib.repr(row)}")
    for field, parse in FIELDS.items():
        if field in row:
            try:
                return parse(row[field])
            except ConfigError as error:
                raise ConfigError(f"has a field {field!r} that {error}") from None
    raise ConfigError(f"has none of the fields {', '.join(FIELDS)}, but {', '.join(row)}")


def _messages(value: Any) -> Messages:
    require(
        isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value),
        f"must be a list of messages, got {reprlib.repr(value)}",
    )
    for message in value:
        require(isinstance(message.get("role"), str), "must say the role of every message")
        _check_text(message.get("content"))
    require(value[-1]["role"] != "assistant", "must not end with an answer")
    return list(value)


def _first_turn(value: Any) -> Messages:
    require(
        isinstance(value, list) and bool(value),
        f"must be a list of texts, got {reprlib.repr(value)}",
    )
    return _user(value[0])


def _user(value: Any) -> Messages:
    _check_text(value)
    return [{"role": "user", "content": value}]


def _check_text(value: Any) -> None:
    require(
        isinstance(value, str) and bool(value.strip()),
        f"must hold text, got {reprlib.repr(value)}",
    )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError("must be valid Unicode, but has a lone surrogate") from None


FIELDS: dict[str, Callable[[Any], Messages]] = {
    "messages": _messages,
    "turns": _first_turn,
    "prompt": _user,
    "question": _user,
    "text": _user,
}
"""How each field that may hold a conversation is read; the first one that a row has counts."""
