"""`throughput`: many requests at once, from the first prompt to the last token."""

from __future__ import annotations

import dataclasses
import statistics
import time

from mmtp_jax.bench.batch import as_served, random_prompts
from mmtp_jax.bench.presets import ModelOptions
from mmtp_jax.config import SMALL, require
from mmtp_jax.describe import count_parameters
from mmtp_jax.engine.core import EngineCore
from mmtp_jax.progress import CompileBar
from mmtp_jax.sampling.params import SamplingParams

# Greedy tokens of the request that runs before the clock starts.
WARM_UP_TOKENS = 4


@dataclasses.dataclass(frozen=True)
class ThroughputOptions:
    """What to generate, and with what limits. `row_counts` None: as a server would compile."""

    num_prompts: int = 256
    prompt_len: int = 128
    output_len: int = 128
    num_speculative_tokens: int = 0
    max_num_seqs: int = 64
    max_num_batched_tokens: int = SMALL.max_num_batched_tokens
    row_counts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("num_prompts", "prompt_len", "output_len"):
            flag = f"--{name.replace('_', '-')}"
            require(getattr(self, name) >= 1, f"{flag} must be >= 1, got {getattr(self, name)}")
        counts = self.row_counts
        require(
            counts is None
            or (
                list(counts) == sorted(set(counts))
                and counts[0] > self.num_speculative_tokens
                and counts[-1] >= self.max_num_batched_tokens
            ),
            f"--row-counts must ascend from at least {self.num_speculative_tokens + 1}"
            " (--num-speculative-tokens + 1) to at least --max-num-batched-tokens"
            f" ({self.max_num_batched_tokens}), got {counts}",
        )


@dataclasses.dataclass(frozen=True)
class Throughput:
    """Totals of a run. `tokens_per_step` are those of one request's verification, 1 without
    speculation; `in_steps` is the share of the time spent in the engine's steps."""

    num_speculative_tokens: int
    num_prompts: int
    prompt_len: int
    output_len: int
    max_num_seqs: int
    row_counts: tuple[int, ...]
    seconds: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    requests_per_second: float
    steps: int
    median_ms_per_step: float
    tokens_per_step: float
    in_steps: float
    preemptions: int
    load_s: float
    compile_s: float
    programs: int
    target_parameters: int
    module_parameters: int


def throughput(model: ModelOptions, options: ThroughputOptions) -> Throughput:
    """Generate all requests, greedily and to their full length."""
    begin = time.perf_counter()
    context = options.prompt_len + max(options.output_len, WARM_UP_TOKENS)
    loaded = model.load(options.num_speculative_tokens, max_model_len=context)
    config = dataclasses.replace(
        loaded.config,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )
    loaded_at = time.perf_counter()
    with CompileBar(visible=True) as bar:
        core = EngineCore(
            config,
            loaded.graph,
            loaded.params,
            max_model_len=context,
            progress=bar.update,
            row_counts=options.row_counts,
        )
    compiled_at = time.perf_counter()
    vocab_size = loaded.graph.config.vocab_size
    prompts = random_prompts(options.num_prompts + 1, options.prompt_len, vocab_size)
    _generate(core, prompts[:1], WARM_UP_TOKENS)
    warm = dataclasses.replace(core.stats)
    with as_served():
        start = time.perf_counter()
        times = _generate(core, prompts[1:], options.output_len)
        seconds = time.perf_counter() - start
    tokens = core.stats.tokens - warm.tokens
    target, modules = count_parameters(loaded.graph)
    return Throughput(
        num_speculative_tokens=core.num_speculative_tokens,
        num_prompts=options.num_prompts,
        prompt_len=options.prompt_len,
        output_len=options.output_len,
        max_num_seqs=options.max_num_seqs,
        row_counts=tuple(bucket.num_rows for bucket in core.device.programs.buckets),
        seconds=seconds,
        output_tokens_per_second=tokens / seconds,
        total_tokens_per_second=(tokens + options.num_prompts * options.prompt_len) / seconds,
        requests_per_second=options.num_prompts / seconds,
        steps=core.stats.steps - warm.steps,
        median_ms_per_step=1e3 * statistics.median(times),
        tokens_per_step=tokens / (core.stats.decode_steps - warm.decode_steps),
        in_steps=sum(times) / seconds,
        preemptions=core.scheduler.num_preemptions,
        load_s=loaded_at - begin,
        compile_s=compiled_at - loaded_at,
        programs=core.device.programs.num_programs,
        target_parameters=target,
        module_parameters=modules,
    )


def _generate(core: EngineCore, prompts: list[list[int]], output_len: int) -> list[float]:
    """Run the prompts to the end; the seconds of every step."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        core.add(str(index), prompt, params, seed=index)
    times = []
    while core.has_work:
        begin = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - begin)
    return times
