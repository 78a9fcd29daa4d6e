"""`LLM`: load a model once, then generate, chat, stream, score, and look at what happened."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import queue
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from mmtp_jax.config import SpeculativeConfig, engine_config, require
from mmtp_jax.engine.core import EngineCore
from mmtp_jax.engine.delta import TokenDelta
from mmtp_jax.engine.driver import EngineDriver, Submission
from mmtp_jax.engine.grammar import Grammar, Grammars
from mmtp_jax.engine.programs import enable_compilation_cache
from mmtp_jax.loader import LoadedModel, load_model
from mmtp_jax.outputs import RequestOutput, Sample
from mmtp_jax.progress import CompileBar, GenerationBar
from mmtp_jax.prompts import (
    Messages,
    Prompt,
    as_batch,
    as_conversations,
    checked_ids,
    per_prompt,
)
from mmtp_jax.sampling.params import SamplingParams, default_seed, sample_seed
from mmtp_jax.scoring import Scorer
from mmtp_jax.tokenizer import Tokenizer

Event = TokenDelta | BaseException


class LLM:
    """A model with its engine.

    `model` is a known name, a directory, a .gguf file or a hub id. `speculative_config` is a
    `SpeculativeConfig` or a mapping with its fields; by default every MTP module the checkpoint
    ships is used, or those that come with this package for a known name. The other keywords are
    the fields of `EngineConfig` and `CacheConfig`.

    Raises `ConfigError` for values that cannot work and `ModelError` if the model cannot be loaded.
    Requests may come from any thread; `close` (or leaving a `with` block) stops the engine.
    """

    def __init__(
        self,
        model: str = "smollm2-135m-instruct",
        *,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        progress: bool = True,
        **options: Any,
    ) -> None:
        config = engine_config(model, speculative_config, **options)
        enable_compilation_cache()
        self._start(load_model(config), progress)

    @classmethod
    def from_loaded(cls, loaded: LoadedModel, *, progress: bool = False, **core: Any) -> LLM:
        """An LLM over a model already in memory; `core` goes to `EngineCore`."""
        llm = cls.__new__(cls)
        llm._start(loaded, progress, **core)
        return llm

    def _start(self, loaded: LoadedModel, progress: bool, **core: Any) -> None:
        self.config = loaded.config
        self.model_config = loaded.graph.config
        self.max_model_len = loaded.max_model_len
        self._tokenizer = loaded.tokenizer
        self._grammars: Grammars | None = None
        if loaded.tokenizer is not None:
            model = loaded.graph.config
            self._grammars = Grammars(loaded.tokenizer, model.vocab_size, model.eos_token_ids)
        with CompileBar(visible=progress) as bar:
            self.core = EngineCore(
                loaded.config,
                loaded.graph,
                loaded.params,
                max_model_len=loaded.max_model_len,
                progress=bar.update,
                **core,
            )
        self._driver = EngineDriver(self.core)
        # Also at exit: the interpreter must not end under a thread that is running a step.
        weakref.finalize(self, self._driver.close)
        self._ids = itertools.count()
        self._seeds = itertools.count()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine; unfinished requests fail."""
        self._driver.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; ValueError if the model came without one."""
        if self._tokenizer is None:
            raise ValueError(
                "this model has no tokenizer: give prompts as token ids (text is not possible)"
            )
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete every prompt (text or token ids); results in the order of the prompts.

        Raises ValueError if a prompt or its parameters cannot run; nothing is started then.
        """
        batch = as_batch(prompts)
        params = per_prompt(sampling_params, len(batch))
        runs = [self._prepare(prompt, one) for prompt, one in zip(batch, params, strict=True)]
        events: queue.SimpleQueue[tuple[_Run, int, Event]] = queue.SimpleQueue()
        try:
            self._submit(runs, lambda *event: events.put(event)).result()
            unfinished = len(runs)
            with GenerationBar(len(runs), visible=progress) as bar:
                while unfinished:
                    ended = self._take(*events.get())
                    unfinished -= ended
                    bar.update(self.core.stats.tokens_per_step, ended)
        finally:
            for run in runs:
                self._abort(run)
        return [run.output() for run in runs]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them through the model's chat template.

        Raises ValueError as `generate` does, and `ChatTemplateError` (also one) if the model has no
        chat template or it refuses the messages.
        """
        variables = chat_template_kwargs or {}
        prompts = [
            self.tokenizer.chat_ids(conversation, **variables)
            for conversation in as_conversations(messages)
        ]
        return self.generate(prompts, sampling_params, progress=progress)

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield a cumulative output after every step that added tokens (of several steps at once if
        the caller is slower than the engine), the last one finished.

        Leaving the loop early, or cancelling the task, ends the request and frees its pages.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[tuple[_Run, int, Event]] = asyncio.Queue()

        def push(*event: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens any more
                loop.call_soon_threadsafe(events.put_nowait, event)

        (params,) = per_prompt(sampling_params, 1)
        run = self._prepare(prompt, params)
        try:
            await asyncio.wrap_future(self._submit([run], push))
            while not run.finished:
                self._take(*(await events.get()))
                while not events.empty():
                    self._take(*events.get_nowait())
                yield run.output()
        finally:
            self._abort(run)

    def score(self, token_ids: Sequence[int]) -> dict[str, np.ndarray]:
        """Teacher-forced logits through the engine's own chunked step and cache.

        Returns "logits" float32 [T, V] of the target (row t predicts token t+1) and "mtp_logits"
        float32 [N, T, V]: row t of module m predicts token t+2+m and is valid for t <= T-2-m;
        later rows are NaN.
        """
        prompt = checked_ids(token_ids)
        scorer = Scorer(len(prompt), self.model_config)
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        request_id = f"score-{next(self._ids)}"
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()

        def add(core: EngineCore) -> None:
            core.add(request_id, prompt, params, 0, collector=scorer.collect)

        try:
            self._driver.submit([Submission(request_id, add, events.put)]).result()
            event = events.get()
            if isinstance(event, BaseException):
                raise event
        finally:
            self._driver.finish(request_id)
        return scorer.result()

    def stats(self) -> dict[str, Any]:
        """What the engine did since start, and what it holds now."""

        def snapshot(core: EngineCore) -> dict[str, Any]:
            stats, scheduler = core.stats, core.scheduler
            return {
                "steps": stats.steps,
                "tokens": stats.tokens,
                "tokens_per_step": stats.tokens_per_step,
                "acceptance_by_position": stats.acceptance.rates,
                "drafted_by_position": list(stats.acceptance.drafted),
                "accepted_by_position": list(stats.acceptance.accepted),
                "requests_running": len(scheduler.running),
                "requests_waiting": len(scheduler.waiting),
                "preemptions": scheduler.num_preemptions,
                "pages": [
                    {
                        "group": group.name,
                        "total": pool.num_pages - 1,
                        "referenced": pool.num_referenced,
                        "free": pool.num_free,
                    }
                    for group, pool in zip(core.cache.groups, core.cache.pools, strict=True)
                ],
            }

        return self._driver.call(snapshot)

    def _prepare(self, prompt: Prompt, params: SamplingParams) -> _Run:
        text = prompt if isinstance(prompt, str) else None
        ids = checked_ids(prompt) if text is None else self.tokenizer.encode(text)
        require(
            not params.stop or self._tokenizer is not None,
            "stop strings need a tokenizer, and this model has none: use stop_token_ids",
        )
        seed = default_seed(self.config.seed, next(self._seeds))
        if params.seed is not None:
            seed = params.seed
        samples = [
            Sample(
                index,
                params,
                self._tokenizer,
                self.model_config.eos_token_ids,
                self.model_config.num_drafts,
            )
            for index in range(params.n)
        ]
        names = [f"{next(self._ids)}" for _ in samples]
        return _Run(text, ids, params, seed, samples, names, self._grammar(params))

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        """The grammar of every sample, compiled on the caller's thread."""
        if params.structured_outputs is None:
            return None
        require(
            self._grammars is not None,
            "structured_outputs need a tokenizer, and this model has none",
        )
        assert self._grammars is not None
        return self._grammars.compile(params)

    def _submit(
        self, runs: Sequence[_Run], push: Callable[[_Run, int, Event], None]
    ) -> Future[None]:
        """Start every sample of `runs`, or nothing; `push` gets (run, sample index, event)."""
        submissions = []
        for run in runs:
            for index, name in enumerate(run.names):
                grammar = None if run.grammar is None else run.grammar.copy()

                def add(
                    core: EngineCore,
                    run: _Run = run,
                    name: str = name,
                    seed: int = sample_seed(run.seed, index),
                    grammar: Grammar | None = grammar,
                ) -> None:
                    core.add(name, run.prompt_ids, run.params, seed, grammar=grammar)

                submissions.append(Submission(name, add, functools.partial(push, run, index)))
        return self._driver.submit(submissions)

    def _take(self, run: _Run, index: int, event: Event) -> bool:
        """Add an event to its sample; True if that finished the run."""
        if isinstance(event, BaseException):
            raise event
        sample = run.samples[index]
        if sample.finish_reason is not None:
            return False  # from a step that was in flight when a stop string ended the sample
        if sample.take(event):
            self._driver.finish(run.names[index], "stop")
        return run.finished

    def _abort(self, run: _Run) -> None:
        for sample, name in zip(run.samples, run.names, strict=True):
            if sample.finish_reason is None:
                self._driver.finish(name)


@dataclasses.dataclass
class _Run:
    """One prompt on its way: a request per sample."""

    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    samples: list[Sample]
    names: list[str]
    grammar: Grammar | None

    @property
    def finished(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples)

    def output(self) -> RequestOutput:
        return RequestOutput(
            prompt=self.prompt,
            prompt_token_ids=tuple(self.prompt_ids),
            outputs=tuple(sample.output() for sample in self.samples),
            num_cached_tokens=max(sample.num_cached_tokens for sample in self.samples),
            prompt_logprobs=self.samples[0].prompt_logprobs,
        )
