"""What a step costs on average, where some steps also prefill.

Where such steps are few, all modules run in them, and a request is free to draft as deep as it
likes. Where they are many, only as many modules run as in the other steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmtp_jax.adaptive.costs import Program, StepCosts

# The share of steps that prefill is an average over about so many steps, and ignored if small.
MEMORY = 64
LEAST_SHARE = 0.02
# All modules run in prefills if that takes no more than this part of the time.
FREEDOM = 0.01


class MixedCosts:
    """The seconds of `costs`, weighted by what the engine's last steps were."""

    def __init__(self, programs: Sequence[Program], num_drafts: int, costs: StepCosts) -> None:
        self._programs = sorted(programs)
        self._num_drafts = num_drafts
        self._costs = costs
        self._share = 0.0
        self._chunk_rows = 0.0
        # Those that decode: a program needs room for them.
        self.num_requests = 0

    def count(self, chunk_rows: int) -> None:
        """A step ran, with so many rows of prompts."""
        self._share += ((chunk_rows > 0) - self._share) / MEMORY
        self._chunk_rows += (chunk_rows - self._chunk_rows) / MEMORY

    @property
    def chunk_rows(self) -> int:
        """Rows of prompts in a step that has some."""
        return round(self._chunk_rows / self._share) if self._share > 0 else 0

    def seconds(self, program: Program) -> float:
        """The mean of steps with and without rows of prompts."""
        return self._mean(program)[0]

    def prefill_depth(self, program: Program) -> int:
        """The modules that run in prefills where the other steps run in `program`."""
        return self._mean(program)[1]

    def step_seconds(self, depth: int, rows: int) -> float:
        """The seconds of a step so deep, in the first program that has so many rows; of several in
        the last if none has."""
        fitting = (
            program
            for program in self._programs
            if program.depth >= depth
            and program.rows >= rows
            and program.most_requests >= self.num_requests
        )
        program = next(fitting, self._programs[-1])
        return -(-rows // program.rows) * self._costs.seconds(program)

    def _mean(self, program: Program) -> tuple[float, int]:
        alone = self._costs.seconds(program)
        if self._share < LEAST_SHARE:
            return alone, self._num_drafts
        rows = program.rows + self.chunk_rows
        deep, shallow = (
            alone + self._share * (self.step_seconds(depth, rows) - alone)
            for depth in (self._num_drafts, program.depth)
        )
        if deep <= shallow + FREEDOM * alone:
            return deep, self._num_drafts
        return shallow, program.depth
