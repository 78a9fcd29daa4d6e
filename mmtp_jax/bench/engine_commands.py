"""The commands that measure the engine itself: `latency`, `throughput` and `startup`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from mmtp_jax.arguments import add_model_options, add_modules_option, option
from mmtp_jax.bench import report
from mmtp_jax.bench.latency import WARM_UP_STEPS, Latency, LatencyOptions, latencies
from mmtp_jax.bench.presets import ARCHITECTURES, NAMES, ModelOptions, loadable
from mmtp_jax.bench.startup import startup
from mmtp_jax.bench.throughput import ThroughputOptions, throughput
from mmtp_jax.engine.programs import enable_compilation_cache
from mmtp_jax.loader import parameter_dtype
from mmtp_jax.progress import say
from pallas_kernels.bench.output import show, write_facts
from pallas_kernels.bench.timing import measure_rates

PRESETS = f"--model also takes {', '.join((*NAMES, *ARCHITECTURES))}"


def add_engine_commands(commands: Any) -> None:
    _add_latency(commands)
    _add_throughput(commands)
    _add_startup(commands)


def _latency(arguments: argparse.Namespace, argv: Sequence[str]) -> tuple[dict[str, Any], int]:
    options = LatencyOptions(
        batches=tuple(arguments.batch),
        drafts=tuple(arguments.num_speculative_tokens),
        prompt_len=arguments.prompt_len,
        steps=arguments.steps,
        max_model_len=arguments.max_model_len,
        acceptance=tuple(arguments.acceptance),
        prefill_chunk=arguments.prefill_chunk,
        profile=arguments.profile,
    )
    with _model(arguments) as model:
        rates = measure_rates(parameter_dtype(arguments.dtype))
        loading: dict[str, Any] = {}
        results: list[Latency] = []
        facts: dict[str, Any] = {}
        for result in latencies(model, options, rates, loading):
            results.append(result)
            facts = report.environment(argv) | {
                "rates": dataclasses.asdict(rates),
                "startup": loading,
                "results": [dataclasses.asdict(one) for one in results],
            }
            # After each: what was measured stays if the command is cut short.
            write_facts(arguments.json, facts)
            say(report.latency_line(result))
    show(report.latency_table(results, rates))
    return facts, 0


def _throughput(arguments: argparse.Namespace, argv: Sequence[str]) -> tuple[dict[str, Any], int]:
    counts = arguments.row_counts
    options = ThroughputOptions(
        num_prompts=arguments.num_prompts,
        prompt_len=arguments.prompt_len,
        output_len=arguments.output_len,
        num_speculative_tokens=arguments.num_speculative_tokens,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        row_counts=None if counts is None else tuple(counts),
    )
    with _model(arguments) as model:
        result = throughput(model, options)
    facts = report.environment(argv) | {"result": dataclasses.asdict(result)}
    write_facts(arguments.json, facts)
    show(report.throughput_table(result))
    return facts, 0


def _startup(arguments: argparse.Namespace, argv: Sequence[str]) -> tuple[dict[str, Any], int]:
    with loadable(arguments.model, arguments.load_format) as (model, load_format):
        result = startup(model, load_format, arguments.options)
    # Only now: the servers had the device to themselves.
    facts = report.environment(argv) | {"result": dataclasses.asdict(result)}
    write_facts(arguments.json, facts)
    show(report.startup_table(result))
    return facts, 0


@contextmanager
def _model(arguments: argparse.Namespace) -> Iterator[ModelOptions]:
    """The model that the options name, with the cache of compiled programs set up."""
    if arguments.compilation_cache:
        enable_compilation_cache()
    else:
        jax.config.update("jax_enable_compilation_cache", False)
    with loadable(arguments.model, arguments.load_format) as (model, load_format):
        yield ModelOptions(
            model=model,
            load_format=load_format,
            dtype=arguments.dtype,
            seed=arguments.seed,
            hf_overrides=arguments.hf_overrides,
            tensor_parallel_size=arguments.tensor_parallel_size,
            speculative_model=arguments.speculative_model,
        )


def _add_latency(commands: Any) -> None:
    default = LatencyOptions()
    text = "milliseconds per step and tokens per second of batches that decode"
    one = commands.add_parser("latency", help=text, description=f"{text}; {PRESETS}")
    one.set_defaults(run=_latency)
    add_modules_option(add_model_options(one))
    group = one.add_argument_group("measurement")
    several: dict[str, Any] = {"type": int, "nargs": "+"}
    help = "requests decoding at once; one engine each"
    option(group, "--batch", **several, default=list(default.batches), help=help)
    help = "numbers of drafts; random modules where the checkpoint ships none"
    option(group, "--num-speculative-tokens", **several, default=list(default.drafts), help=help)
    help = "random token ids per prompt"
    option(group, "--prompt-len", type=int, default=default.prompt_len, help=help)
    help = f"timed steps, after {WARM_UP_STEPS} of warm-up"
    option(group, "--steps", type=int, default=default.steps, help=help)
    help = "positions per request (default: what the steps can fill)"
    option(group, "--max-model-len", type=int, help=help)
    help = "also measure drafts that are accepted with these probabilities"
    option(group, "--acceptance", type=float, nargs="+", default=[], help=help)
    help = "also measure steps with so many rows of a prompt beside the batch; 0: none"
    option(group, "--prefill-chunk", type=int, default=default.prefill_chunk, help=help)
    help = "write traces of jax.profiler of a few steps there"
    option(group, "--profile", type=Path, metavar="DIR", help=help)
    _add_common(group)


def _add_throughput(commands: Any) -> None:
    default = ThroughputOptions()
    text = "tokens and requests per second of many requests"
    one = commands.add_parser("throughput", help=text, description=f"{text}; {PRESETS}")
    one.set_defaults(run=_throughput)
    add_modules_option(add_model_options(one))
    group = one.add_argument_group("measurement")
    for flag, value, help in (
        ("--num-prompts", default.num_prompts, "requests, all there at the start"),
        ("--prompt-len", default.prompt_len, "random token ids per prompt"),
        ("--output-len", default.output_len, "tokens that each request generates"),
        ("--num-speculative-tokens", 0, "random modules where the checkpoint ships none"),
        ("--max-num-seqs", default.max_num_seqs, "requests that run at once"),
        ("--max-num-batched-tokens", default.max_num_batched_tokens, "rows of one step"),
    ):
        option(group, flag, type=int, default=value, help=help)
    help = "compile only these programs (default: what a server compiles)"
    option(group, "--row-counts", type=int, nargs="+", help=help)
    _add_common(group)


def _add_startup(commands: Any) -> None:
    text = "seconds until a server is ready, with an empty cache of programs and with a full one"
    one = commands.add_parser("startup", help=text, description=f"{text}; {PRESETS}")
    one.set_defaults(run=_startup)
    group = one.add_argument_group("measurement")
    option(group, "--model", default=next(iter(NAMES)), help="what the server serves")
    choices = ("auto", "dummy")
    option(group, "--load-format", choices=choices, default="auto", help="of its weights")
    option(group, "--json", type=Path, metavar="FILE", help="write the results here too")
    help = "after --: more options of python -m mmtp_jax.serve"
    one.add_argument("options", nargs="*", metavar="OPTION", help=help)


def _add_common(group: Any) -> None:
    option(group, "--json", type=Path, metavar="FILE", help="write the results here too")
    help = "keep compiled programs on disk, and find them there"
    action = argparse.BooleanOptionalAction
    option(group, "--compilation-cache", action=action, default=True, help=help)
