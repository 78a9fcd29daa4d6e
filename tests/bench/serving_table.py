"""Run by hand, on the machine to measure: whether speculation pays, and where it does not.

Servers with different numbers of drafts get the same requests through `mmtp_jax.bench serving`, in
turns: every set of prompts, temperature and number of open requests, and new requests at random
times, at a share of what the first server can take. The first is what the others are compared with.
All are started before, one after the other, with caches that fit the device together.

    python tests/bench/serving_table.py --out FOLDER --prompts gsm8k_test.jsonl.gz \\
        mt_bench.jsonl.gz --num-speculative-tokens 0 auto 4 -- --cache-bytes 30000000000

The folder gets every report, `table.json`, `table.md` and, with the extra `plot`, `plot.png`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mmtp_jax.bench.serving.plot import draw, read_line
from mmtp_jax.bench.startup import running
from pallas_kernels.bench.output import run_of, write_facts

NAMES = {"0": "plain", "auto": "auto"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--num-speculative-tokens", nargs="+", default=["0", "auto"])
    parser.add_argument("--temperatures", nargs="+", default=["0", "1"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--max-tokens", default="256")
    parser.add_argument("--duration", default="4", help="seconds of each load")
    parser.add_argument("--rate-share", type=float, default=0.7, help="of the first's requests/s")
    parser.add_argument("--rate-duration", default="15")
    parser.add_argument("--warm-up", default="64")
    parser.add_argument("--processes", default="4", help="of the client")
    parser.add_argument("server", nargs="*", metavar="OPTION", help="after --: of every server")
    return parser.parse_args()


def measure(args: argparse.Namespace, url: str, label: str, name: str, load: list[str]) -> Any:
    """The report of one call of `serving`, kept in the folder as `label-name.json`."""
    file = args.out / f"{label}-{name}.json"
    command = [sys.executable, "-m", "mmtp_jax.bench", "serving", "--base-url", url]
    command += ["--label", label, "--json", str(file), "--warm-up", args.warm_up]
    command += ["--max-tokens", args.max_tokens, "--processes", args.processes, *load]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return json.loads(file.read_text())


def rows(label: str, prompts: str, temperature: str, report: Any) -> list[dict[str, Any]]:
    """What a report says, as lines of the table."""
    return [
        {
            "drafts": label,
            "prompts": prompts,
            "temperature": float(temperature),
            "load": one["concurrency"] or f"{one['request_rate']:g}/s",
            "tokens_per_second": round(one["output_tokens_per_second"], 1),
            "requests_per_second": round(one["requests_per_second"], 2),
            "requests": one["succeeded"],
            "failures": one["failures"],
            "itl_ms": {name: round(one["itl_ms"][name], 3) for name in ("p50", "p90", "p99")},
            "ttft_ms": {name: round(one["ttft_ms"][name], 1) for name in ("p50", "p90", "p99")},
            "tokens_per_step": one["acceptance"] and one["acceptance"]["mean_length"],
            "client_busy": round(one["client_busy"], 3),
        }
        for one in report["results"]
    ]


def name_of(prompts: Path) -> str:
    return prompts.name.split(".")[0]


@contextmanager
def serving(args: argparse.Namespace) -> Iterator[tuple[dict[str, str], dict[str, float]]]:
    """All servers: their addresses and the seconds until each was ready, by label."""
    urls: dict[str, str] = {}
    seconds: dict[str, float] = {}
    with ExitStack() as stack:
        for number in args.num_speculative_tokens:
            label = NAMES.get(number, f"k={number}")
            command = [sys.executable, "-m", "mmtp_jax.serve", "--port", "0"]
            command += ["--num-speculative-tokens", number, *args.server]
            urls[label], start = stack.enter_context(running(command, dict(os.environ)))
            seconds[label] = round(start.seconds, 1)
            print(f"{label}: ready after {start.seconds:.1f} s", file=sys.stderr, flush=True)
        yield urls, seconds


def runs(args: argparse.Namespace, table: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """The runs of every server: a set of prompts, a temperature, and the options of the load. The
    rate depends on what the `table` says by then."""
    for index, prompts in enumerate(args.prompts):
        for temperature in args.temperatures:
            closed = ["--duration", args.duration, "--concurrency", *map(str, args.concurrency)]
            yield str(prompts), temperature, "closed", *closed
        if index == 0:
            most = max(args.concurrency)
            rate = next(one["requests_per_second"] for one in table if one["load"] == most)
            rate = f"{args.rate_share * rate:.1f}"
            load = ["--duration", args.rate_duration, "--request-rate", rate]
            yield str(prompts), args.temperatures[0], "rate", *load


def markdown(table: list[dict[str, Any]]) -> str:
    """A line for each load; every server's tokens/s and p99, and its ratio to the first's."""
    labels = list(dict.fromkeys(one["drafts"] for one in table))
    head = ["prompts", "T", "load", *(f"{label}, tokens/s (p99 ms)" for label in labels)]
    lines = [head, ["---"] * len(head)]
    cells: dict[tuple[Any, ...], dict[str, Any]] = {}
    for one in table:
        key = (one["prompts"], f"{one['temperature']:g}", str(one["load"]))
        cells.setdefault(key, {})[one["drafts"]] = one
    for key, by_label in cells.items():
        base = by_label[labels[0]]["tokens_per_second"]
        line = list(key)
        for label in labels:
            one = by_label[label]
            said = f"{one['tokens_per_second']:,.0f} ({one['itl_ms']['p99']:.1f})"
            ratio = one["tokens_per_second"] / base
            line.append(said if label == labels[0] else f"{said} **{ratio:.2f}x**")
        lines.append(line)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    facts = run_of("python tests/bench/serving_table.py", sys.argv[1:])
    table: list[dict[str, Any]] = []
    with serving(args) as (urls, seconds):
        facts["start_s"] = seconds
        for prompts, temperature, kind, *load in runs(args, table):
            name = name_of(Path(prompts))
            load += ["--dataset", prompts, "--temperature", temperature]
            for label, url in urls.items():
                report = measure(args, url, label, f"{name}-{temperature}-{kind}", load)
                table += rows(label, name, temperature, report)
            # After each: what was measured stays if the command is cut short.
            write_facts(args.out / "table.json", facts | {"results": table})
            (args.out / "table.md").write_text(markdown(table))
    print(markdown(table))
    first = f"{name_of(args.prompts[0])}-{args.temperatures[0]}-closed.json"
    draw([read_line(args.out / f"{label}-{first}") for label in urls], args.out / "plot.png")


if __name__ == "__main__":
    main()
