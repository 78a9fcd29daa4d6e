"""What a step costs: seconds by program, measured at warm-up and corrected while the engine runs.

A warm-up measures programs with empty batches. Real steps take longer: each program is corrected by
what it took lately, the others by what their neighbours took. A step takes as long as the device
needs for its program or as the host needs for any step, whichever is longer: the one that was
waited for is known then, of the other that it is no slower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

import numpy as np

# A median of so many steps ignores stalls and follows a lasting change within 8 of them. It begins
# with two of what is expected: one stall is no news, three slow steps are.
MEDIAN_OF = 15
EXPECTED = 2
# What a program took counts so many steps of the engine long.
RECENT_STEPS = 512


class Program(NamedTuple):
    """A compiled step: up to `depth` drafts of each request, `rows` target rows in all."""

    depth: int
    rows: int

    @property
    def most_requests(self) -> int:
        """Requests that it has room for: half of them may have no draft. Room for more would cost
        every module a row of the head for each."""
        return self.rows // max(self.depth // 2, 1)


def _does_more(one: Program, other: Program) -> bool:
    return one.depth >= other.depth and one.rows >= other.rows


class _Median:
    """A running median that has been `start` so far."""

    def __init__(self, start: float) -> None:
        self.value = start
        self.last_step = 0
        self._newest = [start] * EXPECTED

    def add(self, value: float, step: int) -> None:
        self.last_step = step
        self._newest.append(value)
        del self._newest[:-MEDIAN_OF]
        self.value = median(self._newest)


class StepCosts:
    """Seconds per step; `measured` holds those of a warm-up, of at least one program per depth.

    ValueError if `measured` is empty or a time is not positive.
    """

    def __init__(self, measured: Mapping[Program, float]) -> None:
        if not measured:
            raise ValueError("measured must have at least 1 program, got none")
        for program, seconds in measured.items():
            if not 0 < seconds < math.inf:
                raise ValueError(f"measured seconds must be positive, got {seconds} for {program}")
        # No program is slower than one that does more; a warm-up may have met a stall.
        self._measured = {
            program: min(s for p, s in measured.items() if _does_more(p, program))
            for program in measured
        }
        self._own: dict[Program, _Median] = {}
        # Nothing, until steps took longer than the device.
        self._host = _Median(0.0)
        self._guesses: dict[Program, float] = {}
        self._steps = 0

    def observe(self, program: Program, seconds: float, waited: bool = True) -> None:
        """A step of `program` took so long, and the host `waited` for the device or not."""
        expected = self._on_device(program)
        self._steps += 1
        if waited or seconds < expected:
            if not self._is_recent(program):
                self._own[program] = _Median(expected)
            self._own[program].add(seconds, self._steps)
            self._guesses.clear()
        if not waited or seconds < self._host.value:
            self._host.add(seconds, self._steps)

    def forget(self) -> None:
        """Go back to the warm-up's figures: what steps took says little any more."""
        self._own.clear()
        self._guesses.clear()
        self._host = _Median(0.0)

    def seconds(self, program: Program) -> float:
        """What a step of `program` takes now; ValueError if no program of its depth is measured."""
        return max(self._on_device(program), self._host.value)

    def _on_device(self, program: Program) -> float:
        """What the device needs for a step of `program`."""
        if self._is_recent(program):
            return self._own[program].value
        if program not in self._guesses:
            self._guesses[program] = self._guess(program)
        return self._guesses[program]

    def _guess(self, program: Program) -> float:
        """What comes on top of the warm-up's figure, on a line between programs seen recently.

        It is a constant beyond them (requests, contexts), or a factor if it is less than nothing.
        """
        base = self._base(program)
        recent = sorted(
            (self._base(p), own.value) for p, own in self._own.items() if self._is_recent(p)
        )
        if not recent:
            return base
        bases, seconds = np.array(recent).T
        excess = float(np.interp(base, bases, seconds - bases))
        return (
            base + excess if excess > 0 else base * float(np.interp(base, bases, seconds / bases))
        )

    def _is_recent(self, program: Program) -> bool:
        own = self._own.get(program)
        return own is not None and self._steps - own.last_step <= RECENT_STEPS

    def _base(self, program: Program) -> float:
        """The warm-up's figure, or a line through those of the same depth."""
        known = self._measured.get(program)
        if known is None:
            known = self._measured[program] = self._interpolate(program)
        return known

    def _interpolate(self, program: Program) -> float:
        """Linear between row counts and above them (from zero if one is known), constant below."""
        points = sorted((p.rows, s) for p, s in self._measured.items() if p.depth == program.depth)
        if not points:
            raise ValueError(f"no program of depth {program.depth} was measured")
        last, seconds = points[-1]
        if program.rows <= last:
            rows, times = zip(*points, strict=True)
            return float(np.interp(program.rows, rows, times))
        before, earlier = points[-2] if len(points) > 1 else (0, 0.0)
        slope = max(seconds - earlier, 0.0) / (last - before)
        return seconds + slope * (program.rows - last)
