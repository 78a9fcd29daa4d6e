"""What a step costs on average, where some steps also prefill.

A step with rows of prompts runs all modules, whatever is drafted. Where most steps are such, deep
drafts cost little more than rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmtp_jax.adaptive.costs import Program, StepCosts

# The share of steps that prefill is an average over about so many steps, and ignored if small.
MEMORY = 64
LEAST_SHARE = 0.05


class MixedCosts:
    """The seconds of `costs`, weighted by what the engine's last steps were."""

    def __init__(self, programs: Sequence[Program], num_drafts: int, costs: StepCosts) -> None:
        self._deepest = sorted(program for program in programs if program.depth >= num_drafts)
        self._costs = costs
        self._share = 0.0
        self._chunk_rows = 0.0

    def count(self, chunk_rows: int) -> None:
        """A step ran, with so many rows of prompts."""
        self._share += ((chunk_rows > 0) - self._share) / MEMORY
        self._chunk_rows += (chunk_rows - self._chunk_rows) / MEMORY

    def seconds(self, program: Program) -> float:
        """The mean of steps with and without rows of prompts."""
        alone = self._costs.seconds(program)
        if self._share < LEAST_SHARE:
            return alone
        mixed = self.deep_seconds(program.rows + round(self._chunk_rows / self._share))
        return alone + self._share * (mixed - alone)

    def deep_seconds(self, rows: int) -> float:
        """The seconds of a step with all modules, in the smallest program of so many rows; of
        several in the largest if it has not as many."""
        fitting = (program for program in self._deepest if program.rows >= rows)
        program = next(fitting, self._deepest[-1])
        return -(-rows // program.rows) * self._costs.seconds(program)
