"""What the core remembers of requests and of steps, beside their scheduling state."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmtp_jax.engine.buckets import Bucket
from mmtp_jax.engine.grammar import Grammar
from mmtp_jax.engine.logprobs import PromptCollector
from mmtp_jax.engine.plan import RowLogprobs, StepOutput, StepPlan
from mmtp_jax.engine.request import Request, ScheduledRequest
from mmtp_jax.sampling.params import SamplingParams


@dataclass(slots=True)
class Live:
    """A request with its parameters, as the device and the reader of its steps need them."""

    request: Request
    params: SamplingParams
    row: np.ndarray
    bias: np.ndarray | None
    stop_ids: frozenset[int]
    collector: Callable[[StepOutput, int], None] | None = None
    prompt: PromptCollector | None = None
    grammar: Grammar | None = None
    drafts: tuple[int, ...] = ()  # with a grammar: what the next step verifies

    @property
    def is_plain(self) -> bool:
        """Whether tokens are all that it wants of a step."""
        return (
            self.collector is None
            and self.prompt is None
            and self.grammar is None
            and self.params.logprobs is None
        )

    def wants_logprobs(self, samples: bool) -> bool:
        """Of a step that samples a token or does not."""
        return self.prompt is not None or (samples and self.params.logprobs is not None)


@dataclass(frozen=True, slots=True)
class Batch:
    """The requests of a step, and the plan that tells the device of them: `plan` lies there, for
    the next steps of the same program that have the same to say.

    `plain`: nobody wants more than tokens.
    """

    requests: tuple[ScheduledRequest, ...]
    live: tuple[Live, ...]
    plain: bool
    plan: StepPlan


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that was dispatched, at a time of `time.perf_counter`, and not read."""

    bucket: Bucket
    batch: Batch
    output: Future[StepOutput]
    logprobs: Future[RowLogprobs] | None
    dispatched: float

    @property
    def is_done(self) -> bool:
        """Whether the device has answered, so that reading it takes no waiting."""
        if not self.output.done():
            return False
        packed: Any = self.output.result().packed  # is_ready is not declared
        return bool(packed.is_ready())
