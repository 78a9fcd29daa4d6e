"""What answers of completions and of chat completions have in common: running, streaming, usage."""

from __future__ import annotations

import abc
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from fastapi import Request
from starlette.responses import JSONResponse, Response

from mmtp_jax.server.generation import Choice, Generation
from mmtp_jax.server.logprobs import LogprobFormat
from mmtp_jax.server.protocol import SamplingBody
from mmtp_jax.server.responses import usage
from mmtp_jax.server.stream import DONE, EventStream, encoded, event, until_gone


@dataclass(kw_only=True)
class Answer[B: SamplingBody](abc.ABC):
    """One request's answer as it grows."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    body: B
    model: str
    generation: Generation
    format: LogprobFormat
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    @abc.abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer once every choice is finished."""

    @abc.abstractmethod
    def parts(self, choice: Choice) -> list[dict[str, Any]]:
        """The choices of the chunks for what a choice released since the last call."""

    async def respond(self, request: Request) -> Response:
        """Run the request, and answer in the way it asks for."""
        if self.body.stream:
            return EventStream(self._stream())
        return JSONResponse(await until_gone(request.receive, self._complete()))

    def usage(self) -> dict[str, Any]:
        """The usage so far."""
        return usage(self.generation.choices)

    def titled(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A body with what all bodies of this answer have."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def prompt_logprobs(self, choice: Choice) -> list[dict[str, Any] | None] | None:
        """Those of a choice's prompt, if they were asked for."""
        known = choice.sample.prompt_logprobs
        if self.body.prompt_logprobs is None or known is None:
            return None
        return self.format.prompt(choice.prompt.token_ids, known, self.body.prompt_logprobs)

    async def _complete(self) -> dict[str, Any]:
        with self.generation as generation:
            async for _ in generation:
                pass
        return self.whole()

    async def _stream(self) -> AsyncGenerator[bytes, None]:
        with self.generation as generation:
            async for changed in generation:
                parts = [part for choice in changed for part in self.parts(choice)]
                if parts:
                    yield b"".join([self._event(part) for part in parts])
        if self.body.include_usage:
            yield event(self.titled(self.chunk_kind, []) | {"usage": self.usage()})
        yield DONE

    def _event(self, part: dict[str, Any]) -> bytes:
        return b"".join((self._head, encoded(part), self._tail()))

    @cached_property
    def _head(self) -> bytes:
        """What all events of parts begin with. Encoding it once halves what an event costs."""
        empty = event(self.titled(self.chunk_kind, []))
        return empty[: empty.rindex(b"]")]

    def _tail(self) -> bytes:
        """What ends the event of a part."""
        if self.body.continuous_usage:
            return b'],"usage":' + encoded(self.usage()) + b"}\n\n"
        return b'],"usage":null}\n\n' if self.body.include_usage else b"]}\n\n"
