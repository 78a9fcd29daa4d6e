"""`latency`: milliseconds per step and tokens per second of fixed batches.

The engine figure is the median wall time of a step while the whole batch decodes; the bare figure
is that of the compiled step dispatched back to back. Each number of drafts and batch has an engine
of its own, which compiles only what it needs.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from mmtp_jax.bench.acceptance import expected_tokens_per_step, proposals, propose_history
from mmtp_jax.bench.bare import bare_step
from mmtp_jax.bench.batch import CHUNKS_PER_PROMPT, FixedBatch, longest_prompt, random_prompts
from mmtp_jax.bench.presets import ModelOptions
from mmtp_jax.bench.profile import trace
from mmtp_jax.bench.roofline import Floor, step_floor
from mmtp_jax.config import require
from mmtp_jax.describe import count_parameters
from mmtp_jax.loader import LoadedModel
from mmtp_jax.progress import say
from mmtp_jax.sampling.sampler import sample
from pallas_kernels.bench.timing import Rates

WARM_UP_STEPS = 8
PROFILED_STEPS = 8
# Long prompts that are prefilled beside a batch, the first as warm-up.
LONG_PROMPTS = 5
# Steps that are in flight or only scheduled when a batch ends.
_LAST_STEPS = 4

type Mode = Literal["off", "on", "synthetic"]


@dataclasses.dataclass(frozen=True)
class LatencyOptions:
    """What to measure. `prefill_chunk` 0: no steps with chunks; `acceptance`: probabilities of
    synthetic drafts; `max_model_len` None: as much as the steps can fill."""

    batches: tuple[int, ...] = (1, 8, 64)
    drafts: tuple[int, ...] = (0, 8)
    prompt_len: int = 100
    steps: int = 64
    max_model_len: int | None = None
    acceptance: tuple[float, ...] = ()
    prefill_chunk: int = 0
    profile: Path | None = None

    def __post_init__(self) -> None:
        for name, values, least in (
            ("--batch", self.batches, 1),
            ("--num-speculative-tokens", self.drafts, 0),
            ("--prompt-len", (self.prompt_len,), 1),
            ("--steps", (self.steps,), 1),
            ("--prefill-chunk", (self.prefill_chunk,), 0),
        ):
            low = min(values)
            require(low >= least, f"{name} must be >= {least}, got {low}")
        require(max(self.batches) <= 1024, f"--batch must be <= 1024, got {max(self.batches)}")
        for probability in self.acceptance:
            require(0 <= probability <= 1, f"--acceptance must be in [0, 1], got {probability}")
        require(
            self.max_model_len is None or self.max_model_len >= self.context,
            f"--max-model-len must be >= {self.context} for the prompts and steps, got"
            f" {self.max_model_len}",
        )

    @property
    def context(self) -> int:
        """Positions that a request can reach."""
        chunks = LONG_PROMPTS * CHUNKS_PER_PROMPT if self.prefill_chunk else 0
        profiled = PROFILED_STEPS if self.profile is not None else 0
        steps = WARM_UP_STEPS + max(self.steps + profiled, chunks) + _LAST_STEPS
        decoding = self.prompt_len + (steps + 1) * (max(self.drafts) + 1)
        return max(decoding, longest_prompt(self.prefill_chunk) + 1 if self.prefill_chunk else 0)


@dataclasses.dataclass(frozen=True)
class Mixed:
    """A step that carries a chunk of a prompt beside the batch, and its time over that of the step
    without."""

    prefill_chunk: int
    rows: int
    engine_ms_per_step: float
    bare_ms_per_step: float
    engine_ratio: float
    bare_ratio: float
    floor_ms: float
    roofline: float


@dataclasses.dataclass(frozen=True)
class Latency:
    """One batch and number of drafts.

    `mode`: no drafts, the modules' own, or synthetic ones of probability `acceptance`.
    `device_busy` is the bare over the engine's time per step, `roofline` the floor over the bare
    time. `tokens_per_step` are those of one request. `equal_texts`: requests whose text is that of
    the run with the modules' own drafts (synthetic mode only).
    """

    mode: Mode
    num_speculative_tokens: int
    batch: int
    rows: int
    context: int
    engine_ms_per_step: float
    bare_ms_per_step: float
    device_busy: float
    tokens_per_second: float
    tokens_per_step: float
    acceptance: float | None
    expected_tokens_per_step: float | None
    equal_texts: int | None
    floor_ms: float
    floor_bytes: int
    floor_flops: int
    roofline: float
    compile_s: float
    programs: int
    mixed: Mixed | None


def latencies(
    model: ModelOptions, options: LatencyOptions, rates: Rates, startup: dict[str, Any]
) -> Iterator[Latency]:
    """Every measurement, one after the other; `startup` gets what loading took, per number of
    drafts."""
    context = options.max_model_len or options.context
    for k in options.drafts:
        begin = time.perf_counter()
        loaded = model.load(k, max_model_len=context)
        target, modules = count_parameters(loaded.graph)
        startup[f"k={k}"] = {
            "load_s": time.perf_counter() - begin,
            "target_parameters": target,
            "module_parameters": modules,
            "max_model_len": context,
        }
        say(f"k={k}: {target:,} + {modules:,} parameters")
        for batch in options.batches:
            yield from _of_batch(loaded, batch, options, rates)
        del loaded


def _of_batch(
    loaded: LoadedModel, batch: int, options: LatencyOptions, rates: Rates
) -> Iterator[Latency]:
    gc.collect()  # the last engine's cache, which the next one needs the memory of
    model = loaded.graph.config
    prompts = random_prompts(batch, options.prompt_len, model.vocab_size)
    mode: Mode = "on" if model.num_drafts else "off"
    if options.profile is not None:
        _trace_named(
            loaded, prompts, options.profile / f"{mode}-k{model.num_drafts}-b{batch}-named"
        )
        gc.collect()
    running = FixedBatch(loaded, prompts, sample, options.prefill_chunk)
    yield _measure(running, mode, options, rates)
    if model.num_drafts == 0 or not options.acceptance:
        return
    texts = running.run_to_the_end()
    del running
    gc.collect()
    running = FixedBatch(loaded, prompts, propose_history, options.prefill_chunk)
    for probability in options.acceptance:
        running.proposals = proposals(texts, probability, model.vocab_size, loaded.config.seed)
        result = _measure(running, "synthetic", options, rates)
        yield dataclasses.replace(
            result,
            acceptance=probability,
            expected_tokens_per_step=expected_tokens_per_step(probability, model.num_drafts),
            equal_texts=sum(
                text == known[: len(text)] for text, known in zip(running.texts, texts, strict=True)
            ),
        )


def _trace_named(loaded: LoadedModel, prompts: list[list[int]], directory: Path) -> None:
    """Trace steps whose kernels are launched one by one: those of a CUDA graph carry no scopes."""
    config = dataclasses.replace(loaded.config, enforce_eager=True)
    batch = FixedBatch(dataclasses.replace(loaded, config=config), prompts)
    batch.start()
    batch.steps(WARM_UP_STEPS)
    with trace(directory):
        batch.steps(PROFILED_STEPS)
    batch.finish()


def _measure(batch: FixedBatch, mode: Mode, options: LatencyOptions, rates: Rates) -> Latency:
    core, size = batch.core, len(batch.prompts)
    mixed = _measure_mixed(batch, rates) if options.prefill_chunk else None
    batch.start()
    batch.steps(WARM_UP_STEPS)
    timing = batch.steps(options.steps)
    if options.profile is not None:
        with trace(options.profile / f"{mode}-k{core.num_speculative_tokens}-b{size}"):
            batch.steps(PROFILED_STEPS)
    bare = bare_step(batch, options.steps)
    batch.finish()
    floor = step_floor(core.graph, core.device.params, bare.parts, rates)
    engine_ms = statistics.median(timing.milliseconds)
    if mixed is not None:
        mixed = dataclasses.replace(
            mixed,
            engine_ratio=mixed.engine_ms_per_step / engine_ms,
            bare_ratio=mixed.bare_ms_per_step / bare.milliseconds,
        )
    return Latency(
        mode=mode,
        num_speculative_tokens=core.num_speculative_tokens,
        batch=size,
        rows=bare.rows,
        context=round(statistics.mean(part.context for part in bare.parts)),
        engine_ms_per_step=engine_ms,
        bare_ms_per_step=bare.milliseconds,
        device_busy=bare.milliseconds / engine_ms,
        tokens_per_second=timing.emitted / timing.seconds,
        tokens_per_step=timing.emitted / options.steps / size,
        acceptance=None,
        expected_tokens_per_step=None,
        equal_texts=None,
        floor_ms=floor.milliseconds,
        floor_bytes=floor.bytes,
        floor_flops=floor.flops,
        roofline=floor.milliseconds / bare.milliseconds,
        compile_s=batch.compile_seconds,
        programs=core.device.programs.num_programs,
        mixed=mixed,
    )


def _measure_mixed(batch: FixedBatch, rates: Rates) -> Mixed:
    """The steps with chunks; their ratios are not known yet."""
    batch.start()
    batch.steps(WARM_UP_STEPS)
    batch.steps_with_chunks(1)
    timing = batch.steps_with_chunks(LONG_PROMPTS - 1)
    bare = bare_step(batch, len(timing.milliseconds))
    batch.finish()
    floor: Floor = step_floor(batch.core.graph, batch.core.device.params, bare.parts, rates)
    return Mixed(
        prefill_chunk=batch.prefill_chunk,
        rows=bare.rows,
        engine_ms_per_step=statistics.median(timing.milliseconds),
        bare_ms_per_step=bare.milliseconds,
        engine_ratio=1.0,
        bare_ratio=1.0,
        floor_ms=floor.milliseconds,
        roofline=floor.milliseconds / bare.milliseconds,
    )
