"""Results as JSON and as tables."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from mmtp_jax.bench.latency import Latency
from mmtp_jax.bench.startup import Startup
from mmtp_jax.bench.throughput import Throughput
from pallas_kernels.bench import output
from pallas_kernels.bench.timing import Rates


def environment(argv: Sequence[str]) -> dict[str, Any]:
    """What was run, and where."""
    import jax

    return output.environment("python -m mmtp_jax.bench", argv) | {
        "num_devices": jax.device_count(),
        "platform": platform.platform(),
    }


def latency_line(result: Latency) -> str:
    """One measurement, for those who wait for the others."""
    return (
        f"k={result.num_speculative_tokens} drafts {result.mode} batch {result.batch}: engine"
        f" {result.engine_ms_per_step:.3f} ms, bare {result.bare_ms_per_step:.3f} ms,"
        f" {result.tokens_per_second:,.0f} tokens/s, compiled in {result.compile_s:.1f} s"
    )


def latency_table(results: Sequence[Latency], rates: Rates) -> Table:
    table = _table(f"latency; {rates}")
    names = ["k", "drafts", "batch", "rows", "context", "engine ms", "bare ms", "busy", "tokens/s"]
    for name in (*names, "tokens/step", "floor ms", "roofline", "compile s", "with chunk"):
        table.add_column(name)
    for one in results:
        tokens = f"{one.tokens_per_step:.2f}"
        if one.expected_tokens_per_step is not None:
            tokens += f" of {one.expected_tokens_per_step:.2f}"
        table.add_row(
            str(one.num_speculative_tokens),
            one.mode if one.acceptance is None else f"{one.mode} {one.acceptance:g}",
            str(one.batch),
            str(one.rows),
            str(one.context),
            f"{one.engine_ms_per_step:.3f}",
            f"{one.bare_ms_per_step:.3f}",
            f"{one.device_busy:.0%}",
            f"{one.tokens_per_second:,.0f}",
            tokens,
            f"{one.floor_ms:.3f}",
            f"{one.roofline:.0%}",
            f"{one.compile_s:.1f}",
            ""
            if one.mixed is None
            else f"{one.mixed.engine_ms_per_step:.3f} (x{one.mixed.engine_ratio:.2f}),"
            f" bare {one.mixed.bare_ms_per_step:.3f} (x{one.mixed.bare_ratio:.2f})",
        )
    return table


def throughput_table(result: Throughput) -> Table:
    table = _table("throughput")
    for name in ("output tokens/s", "total tokens/s", "requests/s", "seconds", "steps"):
        table.add_column(name)
    for name in ("ms/step", "tokens/step", "in steps", "compile s"):
        table.add_column(name)
    table.add_row(
        f"{result.output_tokens_per_second:,.0f}",
        f"{result.total_tokens_per_second:,.0f}",
        f"{result.requests_per_second:.2f}",
        f"{result.seconds:.2f}",
        str(result.steps),
        f"{result.median_ms_per_step:.3f}",
        f"{result.tokens_per_step:.2f}",
        f"{result.in_steps:.0%}",
        f"{result.compile_s:.1f}",
    )
    return table


def startup_table(result: Startup) -> Table:
    table = _table(f"startup; warm over cold {result.ratio:.2f}")
    for name in ("start", "seconds", "what it said it was doing, and from when on"):
        table.add_column(name)
    for name, start in (("cold", result.cold), ("warm", result.warm)):
        phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in start.phases.items())
        table.add_row(name, f"{start.seconds:.1f}", phases)
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", header_style="")
