"""What reports of measurements have in common."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def show(table: Table) -> None:
    """Print a table to stderr, however narrow the terminal is said to be."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        console.width = 200
    console.print(table)


def write_facts(file: Path | None, facts: dict[str, Any]) -> None:
    """Write a report, if there is a file for it."""
    if file is not None:
        file.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def run_of(program: str, argv: Sequence[str]) -> dict[str, Any]:
    """What was run. Imports no jax."""
    return {"command": " ".join([program, *argv]), "commit": commit()}


def environment(program: str, argv: Sequence[str]) -> dict[str, Any]:
    """What was run, and on which device."""
    import jax

    return run_of(program, argv) | {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def commit() -> str | None:
    """The commit that is checked out; None outside of a repository."""
    root = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--verify", "HEAD"], cwd=root, capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
