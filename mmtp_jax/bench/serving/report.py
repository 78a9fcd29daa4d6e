"""Results as JSON and as a table."""

from __future__ import annotations

import dataclasses
import itertools
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from mmtp_jax.bench.serving.acceptance import Acceptance
from mmtp_jax.bench.serving.measures import Distribution, Measures
from pallas_kernels.bench.output import run_of

# Above this the times are rather the client's than the server's.
BUSY = 0.8
KEY = "--api-key"


@dataclasses.dataclass(frozen=True)
class Result:
    """A run with `concurrency` requests open at once, or with `request_rate` new ones a second.

    `unfinished` requests were open when it was interrupted, and count nowhere else. `client_busy`:
    the share of the time in which the client's busiest process computed.
    """

    concurrency: int | None
    request_rate: float | None
    measures: Measures
    acceptance: Acceptance | None
    unfinished: int
    interrupted: bool
    client_busy: float

    @property
    def load(self) -> str:
        if self.concurrency is not None:
            return str(self.concurrency)
        return f"{self.request_rate:g}/s"

    def facts(self) -> dict[str, Any]:
        """As plain data, the measures among the rest."""
        facts = dataclasses.asdict(self)
        measured: dict[str, Any] = facts.pop("measures")
        return facts | measured


def environment(argv: Sequence[str], processes: int) -> dict[str, Any]:
    """What was run, and on which machine the client was. An API key stays unsaid."""
    said = [
        "..." if before == KEY else f"{KEY}=..." if word.startswith(f"{KEY}=") else word
        for before, word in itertools.pairwise(["", *argv])
    ]
    return run_of("python -m mmtp_jax.bench", said) | {
        "platform": platform.platform(),
        "client": {"cpu": _cpu(), "cores": os.cpu_count(), "processes": processes},
    }


def result_line(result: Result) -> str:
    """One run, for those who wait for the others."""
    one = result.measures
    itl = "-" if one.itl_ms is None else f"{one.itl_ms.p99:.1f} ms"
    return (
        f"load {result.load}: {one.succeeded} of {one.requests} requests answered,"
        f" {one.output_tokens_per_second:,.0f} tokens/s, p99 of a token {itl}"
    )


def remarks(result: Result) -> list[str]:
    """What a reader of the table has to know besides."""
    one = result.measures
    said = [f"load {result.load}: {n} failed: {why}" for why, n in one.failures.items()]
    if result.client_busy > BUSY:
        said.append(
            f"load {result.load}: the client was {result.client_busy:.0%} busy; more --processes"
            " would tell whether the times are the server's"
        )
    if one.tokens_per_chunk not in (None, "usage"):
        said.append(
            f"load {result.load}: the server does not say how many tokens a chunk has;"
            + (" each counts as one" if one.tokens_per_chunk == "chunks" else " means are used")
        )
    return said


def result_table(label: str, results: Sequence[Result]) -> Table:
    """One line per run. Times are in milliseconds."""
    table = Table(title=f"{label}; p50 / p99 in ms", title_justify="left", header_style="")
    names = ["load", "answered", "tokens/s", "requests/s", "goodput", "TTFT", "TPOT", "ITL"]
    for name in (*names, "between chunks", "tokens/chunk", "accepted by position", "client"):
        table.add_column(name)
    for result in results:
        one = result.measures
        table.add_row(
            result.load,
            f"{one.succeeded} of {one.requests}",
            f"{one.output_tokens_per_second:,.0f}",
            f"{one.requests_per_second:.2f}",
            "" if one.goodput is None else f"{one.goodput:.2f}",
            *(_spread(each) for each in (one.ttft_ms, one.tpot_ms, one.itl_ms, one.chunk_gap_ms)),
            "" if one.mean_tokens_per_chunk is None else f"{one.mean_tokens_per_chunk:.2f}",
            ""
            if result.acceptance is None
            else " ".join(f"{rate:.2f}" for rate in result.acceptance.rate),
            f"{result.client_busy:.0%} busy",
        )
    return table


def _spread(one: Distribution | None) -> str:
    return "" if one is None else f"{one.p50:.1f} / {one.p99:.1f}"


def _cpu() -> str | None:
    """The processor's name, where the system tells."""
    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or None
