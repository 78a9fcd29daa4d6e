"""Results as JSON and as tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from pallas_kernels.bench.attention import AttentionCase
from pallas_kernels.bench.measure import Failure, Result
from pallas_kernels.bench.output import environment
from pallas_kernels.bench.timing import Rates

PROG = "python -m pallas_kernels.bench"


def facts(argv: Sequence[str], rates: Rates, results: Sequence[Result | Failure]) -> dict[str, Any]:
    """What was run, and where, and what came of it."""
    return environment(PROG, argv) | {
        "rates": dataclasses.asdict(rates),
        "results": [dataclasses.asdict(one) for one in results if isinstance(one, Result)],
        "failures": [dataclasses.asdict(one) for one in results if isinstance(one, Failure)],
    }


def line(one: Result | Failure) -> str:
    """One measurement, for those who wait for the others."""
    where = f"{one.kernel}, {one.case}, {one.implementation}"
    if isinstance(one, Failure):
        return f"{where}: failed, {one.reason}"
    return f"{where}: {one.us:,.2f} us, {one.percent_of_copy:.0f} % of copy, error {one.error:.1e}"


def table(results: Sequence[Result | Failure], rates: Rates) -> Table:
    """Of all measurements, beside what a copy and a product reach."""
    found = Table(
        title=str(rates),
        title_justify="left",
        header_style="",
    )
    for name in ("kernel", "case", "implementation"):
        found.add_column(name)
    for name in ("us", "GB/s", "of copy", "TFLOP/s", "of product", "error"):
        found.add_column(name, justify="right")
    for one in results:
        names = (one.kernel, one.case, one.implementation)
        if isinstance(one, Failure):
            found.add_row(*names, "failed")
            continue
        found.add_row(
            *names,
            f"{one.us:,.2f}",
            f"{one.gb_per_s:,.0f}",
            f"{one.percent_of_copy:.0f} %",
            f"{one.tflop_per_s:,.1f}",
            f"{one.percent_of_matmul:.0f} %",
            f"{one.error:.1e}",
        )
    return found


def best_configs(cases: Sequence[AttentionCase], results: Sequence[Result | Failure]) -> list[str]:
    """For each case the fastest configuration, as an entry of the table of the kernel (a case with
    a window, which the table does not hold, by its name)."""
    lines = []
    for case in cases:
        times = {
            one.implementation: one.us
            for one in results
            if isinstance(one, Result) and one.case == case.name
        }
        if "triton" not in times:
            continue
        best = min(times, key=times.__getitem__)
        config = repr(case.config) if best == "triton" else best
        key = repr(case.key) if case.window is None else repr(case.name)
        lines.append(f"{key}: {config},  # {times[best]} us, so far {times['triton']} us")
    return lines
