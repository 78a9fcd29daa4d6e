"""The samples of one HTTP request on their way through the engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from mmtp_jax.engine.delta import TokenDelta
from mmtp_jax.outputs import Sample
from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.server.engine_client import EngineClient, Sink
from mmtp_jax.server.errors import APIError
from mmtp_jax.server.messages import AddRequest
from mmtp_jax.server.metrics import Metrics

logger = logging.getLogger(__name__)

_DEFAULTS = asdict(SamplingParams())


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the text they came from (or stand for)."""

    text: str
    token_ids: list[int]


@dataclass
class Choice:
    """One sample of one prompt: choice `index` of the answer. Times are of `time.monotonic`."""

    index: int
    prompt: Prompt
    sample: Sample
    request_id: str
    seed: int
    last_token: float | None = None

    @property
    def finished(self) -> bool:
        return self.sample.finish_reason is not None


class Generation:
    """Runs every sample of a request; a context manager that leaves nothing running behind.

    Iterating gives the choices that got tokens, those of several steps at once if the reader is
    slower than the engine, or once with all of them complete if nobody reads them before (`whole`:
    a step then costs 3 us instead of 13). Raises `APIError` if the engine refuses a request, or
    ends.
    """

    def __init__(
        self,
        client: EngineClient,
        metrics: Metrics,
        choices: Sequence[Choice],
        params: SamplingParams,
        *,
        whole: bool = False,
        log_text: bool = False,
    ) -> None:
        self.choices = choices
        self._client = client
        self._metrics = metrics
        self._params = params
        self._log_text = log_text
        self._whole = whole
        self._num_open = len(choices)
        self._changed: dict[int, Choice] = {}
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._arrival = time.monotonic()

    def __enter__(self) -> Generation:
        fields = _fields(self._params)
        requests = [
            (
                AddRequest(choice.request_id, choice.prompt.token_ids, fields, choice.seed),
                self._sink(choice),
            )
            for choice in self.choices
        ]
        if self._log_text:
            for choice in self.choices:
                logger.info("request %s: %r", choice.request_id, choice.prompt)
        self._client.submit(requests)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        left = [choice for choice in self.choices if not choice.finished]
        self._client.end([choice.request_id for choice in left], "abort")
        for choice in left:
            self._finish(choice, "error" if isinstance(error, APIError) else "abort")

    async def __aiter__(self) -> AsyncIterator[list[Choice]]:
        running = True
        while running:
            await self._news.wait()
            self._news.clear()
            if self._error is not None:
                raise self._error
            running = self._num_open > 0
            changed, self._changed = self._changed, {}
            yield list(changed.values())

    def _sink(self, choice: Choice) -> Sink:
        def arrived(event: TokenDelta | APIError) -> None:
            # An exception is this request's only, not that of whoever hands out the events.
            try:
                self._take(choice, event)
            except Exception as error:
                self._error = error
            if self._num_open == 0 or self._error is not None or not self._whole:
                self._news.set()

        return arrived

    def _take(self, choice: Choice, event: TokenDelta | APIError) -> None:
        if choice.finished:
            return  # from a step that was in flight when a stop string ended the sample
        if isinstance(event, APIError):
            raise event
        if event.finish_reason == "error":
            raise APIError(500, "the grammar of this request cannot go on (it is too complex)")
        self._time(choice, event)
        self._changed[choice.index] = choice
        sample = choice.sample
        before = len(sample.token_ids)
        if sample.take(event):
            self._client.end([choice.request_id], "stop")
        self._metrics.verified(*sample.verified, len(sample.token_ids) - before)
        if choice.finished:
            self._num_open -= 1
            self._finish(choice, str(choice.sample.finish_reason))

    def _time(self, choice: Choice, delta: TokenDelta) -> None:
        """Measure when tokens arrive, not when the client gets round to reading them."""
        now = time.monotonic()
        if choice.last_token is None:
            self._metrics.first_token(now - self._arrival)
        else:
            self._metrics.next_tokens(now - choice.last_token, len(delta.token_ids))
        choice.last_token = now

    def _finish(self, choice: Choice, reason: str) -> None:
        if self._log_text:
            logger.info("request %s ended (%s): %r", choice.request_id, reason, choice.sample.text)
        self._metrics.request_finished(
            reason,
            seconds=time.monotonic() - self._arrival,
            prompt_tokens=len(choice.prompt.token_ids),
            cached_tokens=choice.sample.num_cached_tokens,
        )


def _fields(params: SamplingParams) -> dict[str, Any]:
    """The fields of `params` that differ from their defaults, as plain data."""
    return {name: value for name, value in asdict(params).items() if value != _DEFAULTS[name]}
