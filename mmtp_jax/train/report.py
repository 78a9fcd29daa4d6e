"""Results of `eval` as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from mmtp_jax.train.evaluate import Evaluation


def evaluation_table(results: Sequence[Evaluation]) -> Table:
    """One line per set and temperature."""
    table = Table(
        "prompts", "T", "texts", "tokens", "tokens/step", "expected", "reached by position"
    )
    for one in results:
        table.add_row(
            one.prompts,
            f"{one.temperature:g}",
            f"{one.num_prompts:,}",
            f"{one.num_tokens:,}",
            f"{one.tokens_per_step:.3f}",
            f"{one.expected_tokens_per_step[-1]:.3f}",
            " ".join(f"{rate:.3f}" for rate in one.reached),
        )
    return table
