"""What the bytes of an answer say: which tokens came when."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
from jaxtyping import Float64

from mmtp_jax.bench.serving.connection import Answer
from mmtp_jax.bench.serving.target import said

# A line of data, whichever way lines end.
_DATA = re.compile(rb"(?<![^\r\n])data: ?([^\r\n]*)[\r\n]")

type Counted = Literal["usage", "averaged", "chunks"]


@dataclass(frozen=True)
class Measured:
    """One request: times in seconds of `time.perf_counter`, and tokens.

    Reads that brought tokens came at `times`, and brought `tokens` each. `counted` says how they
    were told: by the usage in every event; as the mean over all events, of the usage at the end; or
    as one for each event, without any usage. `failure`: why the request does not count.
    """

    begin: float
    end: float
    connect_seconds: float
    times: Float64[np.ndarray, "A"]
    tokens: Float64[np.ndarray, "A"]
    output_tokens: int
    counted: Counted
    input_tokens: int | None
    cached_tokens: int | None
    failure: str | None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    def brings_tokens(self) -> bool:
        delta = self.delta or _Delta()
        return bool(
            self.text
            or delta.content
            or delta.reasoning
            or delta.reasoning_content
            or delta.tool_calls
        )


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Broken(Exception):
    """Why an answer is none."""


_decode = msgspec.json.Decoder(_Event).decode


def measured(answer: Answer) -> Measured:
    """Read an answer that has ended."""
    try:
        if answer.failure is not None:
            raise _Broken(answer.failure)
        if answer.status != 200:
            raise _Broken(f"HTTP {answer.status}{said(bytes(answer.body))}")
        if not answer.content_type.startswith(b"text/event-stream"):
            kind = answer.content_type.decode("latin-1").partition(";")[0]
            raise _Broken(f"the answer is no stream of events, but {kind or 'of no type'}")
        return _read(answer)
    except _Broken as broken:
        return _measured(answer, {}, 0, "chunks", None, str(broken))


def _read(answer: Answer) -> Measured:
    by_usage: dict[float, float] = {}
    by_event: dict[float, float] = {}
    usage = None
    total, told = 0, True
    for time, event in _events(answer):
        if event.usage is not None:
            usage = event.usage
            now = usage.completion_tokens or 0
            if event.choices and now > total:
                by_usage[time] = by_usage.get(time, 0) + now - total
            total = max(total, now)
        elif event.choices:
            told = False
        if any(choice.brings_tokens() for choice in event.choices):
            by_event[time] = by_event.get(time, 0) + 1
    if told and sum(by_usage.values()) == total > 0:
        return _measured(answer, by_usage, total, "usage", usage, None)
    count = sum(by_event.values())
    if not count:
        raise _Broken("the answer has no tokens")
    if not total:
        return _measured(answer, by_event, int(count), "chunks", usage, None)
    average = {time: number * total / count for time, number in by_event.items()}
    return _measured(answer, average, total, "averaged", usage, None)


def _events(answer: Answer) -> Iterator[tuple[float, _Event]]:
    """Every event and when it had come. Raises `_Broken` unless `[DONE]` comes at last."""
    body, read = bytes(answer.body), 0
    for match in _DATA.finditer(body):
        while answer.ends[read] < match.end():
            read += 1
        data = match[1]
        if data.strip() == b"[DONE]":
            return
        try:
            event = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise _Broken("an event is not one of OpenAI's API") from None
        if event.error is not None:
            raise _Broken(f"an event says error{said(data)}")
        yield answer.times[read], event
    raise _Broken("the stream broke off")


def _measured(
    answer: Answer,
    tokens: dict[float, float],
    output_tokens: int,
    counted: Counted,
    usage: _Usage | None,
    failure: str | None,
) -> Measured:
    details = None if usage is None else usage.prompt_tokens_details
    return Measured(
        begin=answer.begin,
        end=answer.end,
        connect_seconds=answer.connect_seconds,
        times=np.fromiter(tokens.keys(), np.float64),
        tokens=np.fromiter(tokens.values(), np.float64),
        output_tokens=output_tokens,
        counted=counted,
        input_tokens=None if usage is None else usage.prompt_tokens,
        cached_tokens=None if details is None else details.cached_tokens,
        failure=failure,
    )
