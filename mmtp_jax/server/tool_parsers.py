"""Reading tool calls from a text as it grows. What comes out does not depend on how it is cut."""

from __future__ import annotations

import abc
import json
import re
import uuid
from dataclasses import dataclass, field
from typing import NoReturn

OPEN = "<tool_call>"
CLOSE = "</tool_call>"

# The inside of a block: what is not a string, strings (which may contain the tag), and so on.
# Possessive, because it is matched again whenever the block has grown.
_INSIDE = re.compile(
    r'((?:[^"<]++|"(?:[^"\\]++|\\.)*+"|<(?!/tool_call>))*+)</tool_call>', re.DOTALL
)
_SURROGATE = re.compile("[\ud800-\udfff]")


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
            block = self._block(start + len(OPEN))
            if block is None:
                break
            call, end = block
            if call is None:
                found.append(self._text[:end])
            else:
                found += [self._text[:start].rstrip(), call]
                self._count += 1
            self._text = self._text[end:]
        if start < 0:
            start = len(self._text) - _overlap(self._text, OPEN)
        # A block may follow: white space before it is held back with its beginning.
        start = len(self._text[:start].rstrip())
        found.append(self._text[:start])
        self._text = self._text[start:]
        return [piece for piece in found if piece != ""]

    def finish(self) -> list[str | ToolCall]:
        found: list[str | ToolCall] = []
        while (end := self._text.find(CLOSE)) >= 0:
            # A string without an end hid the tag.
            end += len(CLOSE)
            found.append(self._text[:end])
            self._text = self._text[end:]
            found += self.push("")
        rest, self._text = self._text, ""
        if rest and not (self._count and rest.isspace()):
            found.append(rest)
        return found

    def _block(self, start: int) -> tuple[ToolCall | None, int] | None:
        """The call (None if it is none) of the block whose inside begins at `start`, and where the
        block ends; None if it is not complete."""
        tag = self._text.find(CLOSE, start)
        inside = _INSIDE.match(self._text, start) if tag >= 0 else None
        if inside is None:
            return None
        text = inside[1].strip()
        read = _read_call(text, self._count)
        if read is None or read[1] < len(text):
            # A string that was none may have hidden the tag.
            return None, tag + len(CLOSE)
        return read[0], inside.end()


class CallList(ToolParser):
    """A JSON array of calls and nothing else, as a constraint makes it. Each comes out when it is
    complete."""

    def __init__(self) -> None:
        self._text = ""
        self._begun = False
        self._count = 0

    def push(self, text: str) -> list[str | ToolCall]:
        self._text += text
        found: list[str | ToolCall] = []
        while True:
            rest = self._text.lstrip(" \t\r\n," if self._begun else " \t\r\n[")
            if not rest.startswith("{"):
                return found
            read = _read_call(rest, self._count)
            if read is None:
                return found
            self._begun = True
            self._count += 1
            self._text = rest[read[1] :]
            found.append(read[0])

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


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# Python's reader takes NaN and Infinity; other readers of JSON do not.
_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _read_call(text: str, index: int) -> tuple[ToolCall, int] | None:
    """The call that a text begins with, and where it ends; None if there is none, or only a part.

    What is nested too deeply for Python's reader is none.
    """
    try:
        value, end = _DECODER.raw_decode(text)
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        name, arguments = value["name"], value.get("arguments", {})
        if not isinstance(arguments, dict) or _SURROGATE.search(name):
            return None
        written = json.dumps(arguments, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
    # Half of a surrogate pair can be escaped in JSON, but it cannot be sent as it is.
    written = _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", written)
    return ToolCall(index, name, written), end


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag`."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0
