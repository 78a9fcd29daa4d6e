"""Throughput against latency, a line for each configuration, as a PNG."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmtp_jax.config import ConfigError, require


@dataclass(frozen=True)
class Line:
    """A configuration: for each run, the p99 of a token's latency in ms, tokens/s, and the load."""

    label: str
    points: tuple[tuple[float, float, str], ...]

    @classmethod
    def of(cls, facts: dict[str, Any]) -> Line:
        """From a report; runs in which nothing was measured have no point."""
        points = tuple(
            (
                float(one["itl_ms"]["p99"]),
                float(one["output_tokens_per_second"]),
                f"{one['request_rate']:g}/s" if one["concurrency"] is None else one["concurrency"],
            )
            for one in facts["results"]
            if one["itl_ms"] is not None
        )
        return cls(str(facts["label"]), tuple((x, y, str(load)) for x, y, load in points))


def read_line(file: Path) -> Line:
    """From a file that `--json` wrote. Raises `ConfigError`."""
    try:
        return Line.of(json.loads(file.read_text()))
    except OSError as error:
        raise ConfigError(f"--compare cannot be read: {error}") from None
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ConfigError(f"--compare must name reports of `serving`, got {file}") from None


def require_plottable(file: Path) -> None:
    """`ConfigError` before anything is measured if a plot cannot be drawn into `file`."""
    require(
        importlib.util.find_spec("matplotlib") is not None,
        "--plot needs matplotlib: pip install 'mmtp_jax[plot]'",
    )
    require(file.suffix == ".png", f"--plot must name a .png file, got {file}")
    try:
        file.open("ab").close()
    except OSError as error:
        raise ConfigError(f"--plot must name a file to write to: {error}") from None


def draw(lines: Sequence[Line], file: Path) -> None:
    """Write the plot. Every point says its load."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(
        xlabel="p99 latency per token (ms)", ylabel="output tokens/s", title="faster is up and left"
    )
    for line in lines:
        axes.plot(
            [x for x, _, _ in line.points],
            [y for _, y, _ in line.points],
            marker="o",
            label=line.label,
        )
        for x, y, load in line.points:
            axes.annotate(load, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=8)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=150, format="png")
