"""The engine's loop: schedule, dispatch, and read a step or two behind.

Steps are dispatched before earlier ones are read, so the device never waits for the host.
Everything the device decides (accepted drafts, stop ids, limits) is already in its state when the
next step runs.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

import jax

from mmtp_jax.adaptive.controller import DraftController
from mmtp_jax.adaptive.costs import StepCosts
from mmtp_jax.cache.manager import CacheManager
from mmtp_jax.config import EngineConfig, require
from mmtp_jax.engine.buckets import (
    CPU_SPACING,
    GPU_SPACING,
    RESERVED_AHEAD,
    Bucket,
    buckets,
    depths_below,
)
from mmtp_jax.engine.delta import TokenDelta, TokenLogprobs
from mmtp_jax.engine.device import Device
from mmtp_jax.engine.draft_lengths import DraftLengths
from mmtp_jax.engine.grammar import Grammar
from mmtp_jax.engine.live import Batch, InFlight, Live
from mmtp_jax.engine.logprobs import PromptCollector, taken_logprobs
from mmtp_jax.engine.plan import HostOutput, RowLogprobs, StepOutput
from mmtp_jax.engine.programs import Progress
from mmtp_jax.engine.request import Drafts, FinishReason, Request, ScheduledRequest
from mmtp_jax.engine.scheduled import ScheduledStep
from mmtp_jax.engine.scheduler import Scheduler
from mmtp_jax.engine.scheduler_config import SchedulerConfig
from mmtp_jax.engine.sizes import behind_of, cache_groups
from mmtp_jax.engine.stats import EngineStats
from mmtp_jax.engine.step import Chooser
from mmtp_jax.engine.warm_up import call_programs, time_programs
from mmtp_jax.models.model import ModelGraph, Params
from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.sampling.sampler import sample
from mmtp_jax.sampling.state import bias_row, host_row

logger = logging.getLogger(__name__)

# Rows per scoring chunk: all their logits of all modules are held at once.
SCORE_CHUNK = 64


def steps_ahead() -> int:
    """Steps that are dispatched while an earlier one runs. With one, a GPU would wait for the host
    to read a step and dispatch another; where the host computes, a second is only a waste for
    requests that end."""
    return 2 if jax.default_backend() == "gpu" else 1


class EngineCore:
    """Requests in, token deltas out. Not thread-safe: one thread calls it.

    `row_counts` says which step programs to compile, instead of the sizes that `buckets` chooses.
    """

    def __init__(
        self,
        config: EngineConfig,
        graph: ModelGraph,
        params: Params,
        *,
        max_model_len: int,
        progress: Progress | None = None,
        chunk_policy: Callable[[Request, int], int] | None = None,
        draft_policy: Callable[[Request], Drafts] | None = None,
        choose_draft: Chooser = sample,
        row_counts: tuple[int, ...] | None = None,
    ) -> None:
        model = graph.config
        num_modules = model.num_modules
        self.config = config
        self.graph = graph
        self.params = params
        self.max_model_len = max_model_len
        self.num_speculative_tokens = model.num_drafts
        width = model.num_drafts + 1
        # A repeated module writes at positions beyond those that the step computes.
        lookahead = max(model.num_drafts - num_modules, 0)
        dtype = graph.dtype(params)
        groups = cache_groups(graph.layout, config, dtype, max_model_len)
        behind = behind_of(config.speculative, num_modules)
        self.cache = CacheManager(groups, num_modules, config.cache.enable_prefix_caching, behind)
        spacing = GPU_SPACING if jax.default_backend() == "gpu" else CPU_SPACING
        sizes = buckets(
            config,
            num_modules=num_modules,
            width=width,
            num_groups=len(groups),
            lookahead=lookahead,
            ahead=RESERVED_AHEAD,
            row_counts=row_counts,
            depths=depths_below(model.num_drafts, spacing) if config.speculative.adaptive else (),
            spacing=spacing,
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=config.limits.max_num_seqs,
                max_num_batched_tokens=config.limits.max_num_batched_tokens,
                max_model_len=max_model_len,
                num_speculative_tokens=self.num_speculative_tokens,
                buckets=sizes,
                lookahead=lookahead,
                ahead=RESERVED_AHEAD,
            ),
            self.cache,
            chunk_policy,
            draft_policy,
        )
        self.device = Device(
            config,
            graph,
            params,
            groups,
            sizes,
            max_model_len=max_model_len,
            lag=max(behind, num_modules, 1),
            choose_draft=choose_draft,
            progress=progress,
        )
        self._lengths: DraftLengths | None = None
        if config.speculative.adaptive and draft_policy is None:
            self._lengths = DraftLengths(
                DraftController(
                    config.limits.max_num_seqs,
                    model.num_drafts,
                    [bucket.program for bucket in sizes],
                    StepCosts(time_programs(self.device, sizes)),
                ),
                model.num_drafts,
                # No step has more rows for a request.
                min(behind, config.limits.max_num_batched_tokens - width),
            )
            self.scheduler.draft_policy = self._lengths
            self.scheduler.depth_policy = self._lengths.depth
        elif jax.default_backend() == "gpu":
            call_programs(self.device, sizes)
        self.stats = EngineStats(model.num_drafts)
        self._live: dict[str, Live] = {}
        self._in_flight: deque[InFlight] = deque()
        self._steps_ahead = steps_ahead()
        self._last_read = 0.0
        # The latest one of every bucket.
        self._batches: dict[Bucket, Batch] = {}

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a dispatched step unread."""
        return self.scheduler.has_requests or bool(self._in_flight)

    def add(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        seed: int,
        *,
        collector: Callable[[StepOutput, int], None] | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        """Queue a request. Raises ValueError for a prompt or parameters that cannot run.

        `grammar` is the compiled `params.structured_outputs`, at its beginning. `seed` keys the
        sampler's noise. A `collector` gets (step output, row) of every step the request takes part
        in, with all rows' logits; such a request reuses no cached prefix and leaves no module out
        of its prefill.
        """
        model = self.graph.config
        for token in prompt_ids:
            if not 0 <= token < model.embedding_size:
                raise ValueError(
                    f"prompt token ids must lie in [0, {model.embedding_size}), got {token}"
                )
        params.validate_for(model.vocab_size, model.eos_token_ids)
        require(
            (params.structured_outputs is None) == (grammar is None),
            "structured_outputs and the compiled grammar must come together",
        )
        request = Request.create(request_id, prompt_ids, params.max_tokens, self.max_model_len)
        if collector is not None:
            request.reuses_prefix = False
            request.wants_all = True
            request.max_chunk = max(SCORE_CHUNK, self.num_speculative_tokens)
        request.awaits_result = grammar is not None
        prompt = None
        if params.prompt_logprobs is not None:
            request.reuses_prefix = False
            prompt = PromptCollector(len(prompt_ids), params.prompt_logprobs)
        self.scheduler.add(request)
        stop_ids = params.stop_ids(model.eos_token_ids)
        self._live[request_id] = Live(
            request=request,
            params=params,
            row=host_row(params, seed, len(prompt_ids), model.eos_token_ids),
            bias=bias_row(params, model.vocab_size),
            stop_ids=frozenset(stop_ids),
            collector=collector,
            prompt=prompt,
            grammar=grammar,
        )

    def finish(self, request_id: str, reason: FinishReason = "abort") -> bool:
        """End a request now (abort, or a stop string the caller found); False if it is unknown."""
        ended = self.scheduler.finish(request_id, reason)
        self._live.pop(request_id, None)
        return ended is not None

    def step(self) -> list[TokenDelta]:
        """Dispatch the next step if there is one, then read the oldest if as many are in flight as
        may be or nothing could be dispatched."""
        if self._lengths is not None:
            self._lengths.decide(self.scheduler)
        scheduled = self.scheduler.schedule()
        if scheduled is not None:
            self._in_flight.append(self._dispatch(scheduled))
        if len(self._in_flight) > self._steps_ahead or (scheduled is None and self._in_flight):
            return self._read(self._in_flight.popleft())
        return []

    def _dispatch(self, scheduled: ScheduledStep) -> InFlight:
        if self._lengths is not None:
            self._lengths.dispatched(scheduled)
        entering = [(one, self._live[one.request.request_id]) for one in scheduled.admissions]
        for _, live in entering:
            live.drafts = ()
        self.device.admit(entering)
        batch = self._batch(scheduled)
        if not batch.plain:
            self.device.set_masks(batch)
        collect = not batch.plain and any(one.collector is not None for one in batch.live)
        output = self.device.step(scheduled.bucket, batch.plan, collect=collect)
        self.stats.steps += 1
        wanted = not batch.plain and any(
            one.wants_logprobs(row.samples)
            for row, one in zip(batch.requests, batch.live, strict=True)
        )
        num_rows = sum(row.num_rows for row in batch.requests) if wanted else 0
        logprobs = self.device.logprobs(num_rows) if wanted else None
        return InFlight(scheduled.bucket, batch, output, logprobs, time.perf_counter())

    def _batch(self, scheduled: ScheduledStep) -> Batch:
        """The batch of a step, its plan on the device: the bucket's last one if it is the same."""
        last = self._batches.get(scheduled.bucket)
        if last is not None and last.requests == scheduled.requests:
            return last
        live = tuple([self._live[row.request.request_id] for row in scheduled.requests])
        batch = Batch(
            scheduled.requests,
            live,
            plain=all(one.is_plain for one in live),
            plan=self.device.upload(scheduled.bucket, scheduled.requests),
        )
        self._batches[scheduled.bucket] = batch
        return batch

    def _read(self, step: InFlight) -> list[TokenDelta]:
        batch = step.batch
        waited = not step.is_done
        answer = step.output.result()
        output = answer.unpack(len(batch.requests))
        self._took(step, waited)
        logprobs = None if step.logprobs is None else jax.device_get(step.logprobs.result())
        deltas = []
        verified: list[tuple[int, int, int]] = []
        for index, (row, live, tokens, count, drafted, done) in enumerate(
            zip(
                batch.requests,
                batch.live,
                output.tokens,
                output.emitted,
                output.drafted,
                output.done,
                strict=True,
            )
        ):
            request = row.request
            if row.incarnation != request.incarnation:
                continue
            emitted = tuple(tokens[:count])
            reason: FinishReason | None = None
            if done and emitted[-1] in live.stop_ids:
                reason = "stop"
                # It ends the drafts that count: those after it were never wanted.
                drafted = min(drafted, count - 1)
            taken = prompt = None
            if not batch.plain:
                if live.collector is not None:
                    live.collector(answer, index)
                if logprobs is not None:
                    taken, prompt = self._taken(row, live, output, index, logprobs)
                if live.grammar is not None and emitted:
                    live.drafts = tuple(output.drafts[index].tolist())
                    if not self._follow(live.grammar, emitted, request.request_id):
                        reason = "error"
            if self.scheduler.update(row, emitted, reason):
                del self._live[request.request_id]
            if emitted:
                self.stats.count(drafted, count - 1, count)
                if self._lengths is not None:
                    verified.append((row.slot, drafted, count - 1))
                deltas.append(
                    TokenDelta(
                        request.request_id,
                        emitted,
                        drafted,
                        count - 1,
                        request.num_cached_tokens,
                        request.finish_reason,
                        taken,
                        prompt,
                    )
                )
        if self._lengths is not None:
            self._lengths.verified(verified)
        return deltas

    def _took(self, step: InFlight, waited: bool) -> None:
        """Note what a step took that came right after the one read before."""
        now = time.perf_counter()
        if self._lengths is not None and step.dispatched <= self._last_read:
            seconds = now - self._last_read
            self._lengths.took(step.bucket, step.batch.requests, seconds, waited)
        self._last_read = now

    def _taken(
        self,
        row: ScheduledRequest,
        live: Live,
        output: HostOutput,
        index: int,
        logprobs: RowLogprobs,
    ) -> tuple[tuple[TokenLogprobs, ...] | None, tuple[TokenLogprobs, ...] | None]:
        """The log-probabilities of what a request emitted, and with its first tokens those of its
        prompt."""
        first, position = output.first_row[index], output.first_position[index]
        count = output.emitted[index]
        taken = prompt = None
        if live.prompt is not None:
            live.prompt.take(logprobs, first, position, row.num_rows)
            if count:
                prompt, live.prompt = live.prompt.result(), None
        if count and live.params.logprobs is not None:
            # The newest token was the last one that the step knew.
            newest = row.request.length - 1
            taken = taken_logprobs(logprobs, first + newest - position, count, live.params.logprobs)
        return taken, prompt

    def _follow(self, grammar: Grammar, emitted: Sequence[int], request_id: str) -> bool:
        """Move a grammar on; False if it failed, be it now or when it computed the masks."""
        grammar.advance(emitted)
        if grammar.error is not None:
            logger.warning("the grammar of request %s cannot go on: %s", request_id, grammar.error)
        return grammar.error is None
