"""The command `serving`: its options, and one run after the other."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mmtp_jax.arguments import json_object, option
from mmtp_jax.bench.serving import acceptance, report
from mmtp_jax.bench.serving.arrivals import arrivals
from mmtp_jax.bench.serving.bodies import Bodies, bodies
from mmtp_jax.bench.serving.measures import measures
from mmtp_jax.bench.serving.options import GOALS, ServingOptions
from mmtp_jax.bench.serving.plot import Line, draw, read_line, require_plottable
from mmtp_jax.bench.serving.processes import Run, processes
from mmtp_jax.bench.serving.report import Result
from mmtp_jax.bench.serving.target import Target
from mmtp_jax.config import require
from mmtp_jax.progress import say
from mmtp_jax.prompt_files import JSON_LINES, TEXT_LINES
from pallas_kernels.bench.output import show, write_facts

MOST_PROCESSES = 4
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


def run_serving(arguments: argparse.Namespace, argv: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Measure; the report, and the exit code: 0, 1 if no request was answered, 130 after Ctrl-C."""
    options = _options(arguments)
    require(arguments.plot is not None or not arguments.compare, "--compare needs --plot")
    lines = [read_line(file) for file in arguments.compare or ()]
    if arguments.plot is not None:
        require_plottable(arguments.plot)
    target = Target.of(arguments.base_url, arguments.api_key or os.environ.get("MMTP_API_KEY"))
    model = target.check(arguments.model)
    requests = bodies(options, model)
    label = arguments.label or model
    facts = report.environment(argv, options.processes) | {
        "label": label,
        "server": {"url": target.url, "model": model},
        "options": _plain(options),
        "results": [],
    }
    results: list[Result] = []
    # Ctrl-C between runs.
    with contextlib.suppress(KeyboardInterrupt):
        for result in _results(options, target, requests):
            results.append(result)
            facts["results"] = [one.facts() for one in results]
            # After each: what was measured stays if the command is cut short.
            write_facts(arguments.json, facts)
            say(report.result_line(result))
    show(report.result_table(label, results))
    for result in results:
        for remark in report.remarks(result):
            say(remark)
    if arguments.plot is not None:
        draw([*lines, Line.of(facts)], arguments.plot)
    if len(results) < len(_loads(options)) or results[-1].interrupted:
        return facts, 130
    return facts, 0 if any(one.measures.succeeded for one in results) else 1


def _results(options: ServingOptions, target: Target, requests: Bodies) -> Iterator[Result]:
    """Every run after its warm-up, until one is interrupted."""
    path = PATHS[options.asked_endpoint]
    with processes(options.processes, target, path, requests, options.timeout) as client:
        for number, (concurrency, rate) in enumerate(_loads(options)):
            if options.warm_up:
                warm_up = dataclasses.replace(
                    options, concurrency=(1,), num_prompts=options.warm_up, duration=None
                )
                first = -options.warm_up
                if client.run(_run(warm_up, 2 * number, first, concurrency, rate)).interrupted:
                    return
            before = acceptance.counts(target)
            observed = client.run(_run(options, 2 * number + 1, 0, concurrency, rate))
            yield Result(
                concurrency=concurrency,
                request_rate=rate,
                measures=measures(observed.requests, options.goals),
                acceptance=acceptance.acceptance(before, acceptance.counts(target)),
                unfinished=observed.unfinished,
                interrupted=observed.interrupted,
                client_busy=observed.busy,
            )
            if observed.interrupted:
                return


def _loads(options: ServingOptions) -> list[tuple[int | None, float | None]]:
    """Concurrency or request rate of every run."""
    if options.request_rates:
        return [(None, rate) for rate in options.request_rates]
    return [(concurrency, None) for concurrency in options.concurrency]


def _run(
    options: ServingOptions, number: int, first: int, concurrency: int | None, rate: float | None
) -> Run:
    count = options.num_prompts if options.duration is None else None
    if rate is None:
        assert concurrency is not None
        return Run(number, first, count, concurrency, options.duration)
    duration, seed = options.duration, options.seed
    times = arrivals(rate, options.burstiness, seed, count=count, duration=duration)
    return Run(number, first, count, arrivals=times)


def _options(arguments: argparse.Namespace) -> ServingOptions:
    return ServingOptions(
        concurrency=tuple(arguments.concurrency),
        request_rates=tuple(arguments.request_rate or ()),
        burstiness=arguments.burstiness,
        num_prompts=arguments.num_prompts,
        duration=arguments.duration,
        warm_up=arguments.warm_up,
        seed=arguments.seed,
        dataset=arguments.dataset,
        random_input_len=tuple(arguments.random_input_len),
        random_ids=tuple(arguments.random_ids),
        endpoint=arguments.endpoint,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        ignore_eos=arguments.ignore_eos,
        extra_body=arguments.extra_body or {},
        goals=dict(arguments.goodput or ()),
        processes=arguments.processes,
        timeout=arguments.timeout,
    )


def _plain(options: ServingOptions) -> dict[str, Any]:
    """The options as JSON can say them."""
    dataset = None if options.dataset is None else str(options.dataset)
    return dataclasses.asdict(options) | {"dataset": dataset, "endpoint": options.asked_endpoint}


def add_serving(commands: Any) -> None:
    default = ServingOptions()
    text = "tokens per second and latencies of any server of OpenAI's API, under load"
    one = commands.add_parser("serving", help=text, description=text)
    one.set_defaults(run=run_serving)

    group = one.add_argument_group("server")
    address = "http://127.0.0.1:8000"
    option(group, "--base-url", default=address, metavar="URL", help="http or https")
    option(group, "--model", help="name to ask for (default: the first of /v1/models)")
    option(group, "--api-key", metavar="KEY", help="to send (default: MMTP_API_KEY, if it is set)")

    group = one.add_argument_group("load")
    several = group.add_mutually_exclusive_group()
    help = "requests open at once; one run each"
    values: dict[str, Any] = {"nargs": "+", "type": int}
    option(several, "--concurrency", **values, default=list(default.concurrency), help=help)
    help = "instead: new requests a second, whatever is open; one run each"
    option(several, "--request-rate", nargs="+", type=float, help=help)
    help = "of --request-rate: 1 is a Poisson process, less comes in bursts, more is evener"
    option(group, "--burstiness", type=float, default=default.burstiness, help=help)
    help = "requests of a run"
    several = group.add_mutually_exclusive_group()
    option(several, "--num-prompts", type=int, default=default.num_prompts, help=help)
    help = "instead: seconds in which requests begin"
    option(several, "--duration", type=float, help=help)
    help = "requests before each run, under the same load, that do not count"
    option(group, "--warm-up", type=int, default=default.warm_up, help=help)
    help = "of random prompts, the order of a dataset, and arrivals"
    option(group, "--seed", type=int, default=default.seed, help=help)

    group = one.add_argument_group("requests")
    help = (
        f"prompts, {', '.join(JSON_LINES + TEXT_LINES)}: lines of text, or objects with messages,"
        " turns (the first is taken), prompt, question or text"
    )
    option(group, "--dataset", type=Path, metavar="FILE", help=help)
    pair: dict[str, Any] = {"nargs": "+", "type": int}
    help = "without --dataset: random token ids per prompt, one number or least and most"
    option(group, "--random-input-len", **pair, default=list(default.random_input_len), help=help)
    help = "these are drawn from, least and most; choose what the model's vocabulary has"
    option(group, "--random-ids", **pair, default=list(default.random_ids), help=help)
    help = "what to ask (default: chat with --dataset, completions without)"
    option(group, "--endpoint", choices=tuple(PATHS), help=help)
    help = "longest answer"
    option(group, "--max-tokens", type=int, default=default.max_tokens, help=help)
    option(group, "--temperature", type=float, default=default.temperature, help="0 is greedy")
    help = "ask for answers of exactly --max-tokens (a field that OpenAI's own API lacks)"
    option(group, "--ignore-eos", action="store_true", help=help)
    help = 'further fields of every request, or others instead, e.g. {"top_p": 0.9}'
    option(group, "--extra-body", type=json_object, metavar="JSON", help=help)
    help = "seconds after which a request has failed"
    option(group, "--timeout", type=float, default=default.timeout, help=help)

    group = one.add_argument_group("measurement")
    help = (
        f"also count the requests a second that meet all of these, in ms: {', '.join(GOALS)},"
        " e.g. ttft:200 tpot:20"
    )
    goals: dict[str, Any] = {"nargs": "+", "type": _goal, "metavar": "NAME:MS"}
    option(group, "--goodput", **goals, help=help)
    help = "of the client, one core each"
    most = min(MOST_PROCESSES, os.cpu_count() or 1)
    option(group, "--processes", type=int, default=most, help=help)
    option(group, "--json", type=Path, metavar="FILE", help="write the results here too")
    help = "draw output tokens/s against the p99 latency of a token, as a PNG"
    option(group, "--plot", type=Path, metavar="FILE", help=help)
    option(group, "--label", metavar="NAME", help="of this configuration (default: the model)")
    help = "reports of earlier runs, as further lines of the plot"
    files: dict[str, Any] = {"nargs": "+", "type": Path, "metavar": "FILE"}
    option(group, "--compare", **files, help=help)


def _goal(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    try:
        if name in GOALS:
            return name, float(limit)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(
        f"must be a name of {', '.join(GOALS)}, a colon and milliseconds, got {text!r}"
    )
