"""Reading tool calls from a text as it grows. What comes out does not depend on how it is cut."""

from __future__ import annotations

import abc
import json
import uuid
from dataclasses import dataclass, field
from typing import Any

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """A complete call; `arguments` is JSON text."""

    index: int
    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}", compare=False)


class ToolParser(abc.ABC):
    """`push` and `finish` give content (texts) and calls, in order; nothing is lost: what turns out
    to be no call is content."""

    @abc.abstractmethod
    def push(self, text: str) -> list[str | ToolCall]:
        """What more text completes."""

    @abc.abstractmethod
    def finish(self) -> list[str | ToolCall]:
        """What was held back, at the end of the text."""


class TaggedCalls(ToolParser):
    """Calls in `<tool_call>` blocks, everything else is content. White space between blocks, and
    between content and a block, belongs to the blocks."""

    def __init__(self) -> None:
        self._text = ""
        self._count = 0

    def push(self, text: str) -> list[str | ToolCall]:
        self._text += text
        found: list[str | ToolCall] = []
        while (start := self._text.find(OPEN)) >= 0:
            end = self._text.find(CLOSE, start)
            if end < 0:
                break
            end += len(CLOSE)
            call = self._call(self._text[start + len(OPEN) : end - len(CLOSE)])
            if call is None:
                found.append(self._text[:end])
            else:
                found += [self._text[:start].rstrip(), call]
            self._text = self._text[end:]
        if start < 0:
            start = len(self._text) - _overlap(self._text, OPEN)
        # A block may follow: white space before it is held back with its beginning.
        start = len(self._text[:start].rstrip())
        found.append(self._text[:start])
        self._text = self._text[start:]
        return [piece for piece in found if piece != ""]

    def finish(self) -> list[str | ToolCall]:
        rest, self._text = self._text, ""
        if self._count and not rest.strip():
            return []
        return [rest] if rest else []

    def _call(self, text: str) -> ToolCall | None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        call = _as_call(self._count, value)
        self._count += call is not None
        return call


class CallList(ToolParser):
    """A JSON array of calls and nothing else, as a constraint makes it. Each comes out when it is
    complete."""

    def __init__(self) -> None:
        self._text = ""
        self._begun = False
        self._count = 0
        self._decoder = json.JSONDecoder()

    def push(self, text: str) -> list[str | ToolCall]:
        self._text += text
        found: list[str | ToolCall] = []
        while True:
            rest = self._text.lstrip(" \t\r\n," if self._begun else " \t\r\n[")
            if not rest.startswith("{"):
                return found
            try:
                value, end = self._decoder.raw_decode(rest)
            except ValueError:
                return found
            call = _as_call(self._count, value)
            if call is None:
                return found
            self._begun = True
            self._count += 1
            self._text = rest[end:]
            found.append(call)

    def finish(self) -> list[str | ToolCall]:
        rest, self._text = self._text, ""
        return [rest] if rest.strip(" \t\r\n],") else []


class NamedCall(ToolParser):
    """The whole text is the arguments of one call, complete when the text is."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._text = ""

    def push(self, text: str) -> list[str | ToolCall]:
        self._text += text
        return []

    def finish(self) -> list[str | ToolCall]:
        return [ToolCall(0, self._name, self._text)]


def _as_call(index: int, value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return ToolCall(index, value["name"], json.dumps(arguments, ensure_ascii=False))


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag`."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0
