"""The command: measure kernels on a GPU. JSON on stdout, a table and progress on stderr."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.bench import attention, choose_token, grouped_matmul, kv_write, report
from pallas_kernels.bench.measure import Case, Failure, Result, measure
from pallas_kernels.bench.output import show, write_facts
from pallas_kernels.bench.timing import measure_rates

KERNELS: dict[str, Any] = {
    "attention": attention,
    "kv_write": kv_write,
    "choose_token": choose_token,
    "grouped_matmul": grouped_matmul,
}
# Rounding to bfloat16 stays far below.
LARGEST_ERROR = 2e-2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code: 0, 1 for failures and wrong results, or 2 for what the user
    can correct."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    try:
        cases = _cases(arguments)
        _check(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rates = measure_rates()
    results: list[Result | Failure] = []
    for kernel, chosen in cases.items():
        for one in measure(kernel, chosen, rates):
            results.append(one)
            print(report.line(one), file=sys.stderr, flush=True)
            if arguments.json is not None:  # after each, in case the command is cut short
                write_facts(arguments.json, report.facts(argv, rates, results))
    show(report.table(results, rates))
    if arguments.tune:
        tuned = [case for case in cases["attention"] if isinstance(case, attention.AttentionCase)]
        print(*report.best_configs(tuned, results), sep="\n", file=sys.stderr)
    print(json.dumps(report.facts(argv, rates, results), indent=1))
    return int(any(_is_wrong(one, arguments.tune) for one in results))


def _cases(arguments: argparse.Namespace) -> dict[str, list[Case]]:
    """The cases that were asked for, by kernel."""
    names = arguments.kernels or list(KERNELS)
    unknown = [name for name in names if name not in KERNELS]
    if unknown:
        raise ValueError(f"kernels must be among {', '.join(KERNELS)}, got {unknown[0]!r}")
    if arguments.tune and "attention" not in names:
        raise ValueError("--tune needs the kernel attention")
    cases: dict[str, list[Case]] = {}
    for name in dict.fromkeys(names):
        chosen = [case for case in KERNELS[name].CASES if arguments.cases in case.name]
        if arguments.tune and name == "attention":
            chosen = attention.tuned(chosen)
        if chosen:
            cases[name] = chosen
    if not cases or (arguments.tune and "attention" not in cases):
        raise ValueError(f"--cases must be part of the name of a case, got {arguments.cases!r}")
    return cases


def _check(arguments: argparse.Namespace) -> None:
    """Say so before anything is measured if it cannot be, or if results cannot be kept."""
    if not _has_gpu():
        raise ValueError("a GPU is needed: elsewhere kernels are only interpreted")
    if arguments.json is not None:
        try:
            arguments.json.open("a").close()
        except OSError as error:
            raise ValueError(f"--json must name a file to write to: {error}") from None


def _has_gpu() -> bool:
    return jax.default_backend() == "gpu"


def _is_wrong(one: Result | Failure, tunes: bool) -> bool:
    if isinstance(one, Failure):
        return not tunes  # configurations are tried that may not fit
    return one.error > LARGEST_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=report.PROG, description=__doc__)
    parser.add_argument("kernels", nargs="*", help=f"of {', '.join(KERNELS)}; default: all")
    parser.add_argument("--cases", default="", metavar="TEXT", help="only cases with this name")
    parser.add_argument(
        "--tune", action="store_true", help="attention: also measure other configurations"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the results there, too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
