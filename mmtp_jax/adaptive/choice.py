"""Which program to run and how many drafts of each request to verify: the most tokens per second.

A request has one row whatever happens, and one more for every draft. A draft is worth the
probability that it and all before it are accepted. So within one program the best drafts are the
most probable ones of the whole batch, as many as rows are left: probabilities never rise with the
position, so these are the first few of each request. Rows are worth filling to the last one, as the
program computes them anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64, Int, Int64

from mmtp_jax.adaptive.costs import Program


@runtime_checkable
class Costs(Protocol):
    """What programs cost, such as `StepCosts`."""

    def seconds(self, program: Program) -> float:
        """The seconds of a step."""
        ...


class Choice(NamedTuple):
    """A program, the drafts of each request, and the tokens per second expected of them."""

    program: Program
    drafts: Int64[np.ndarray, " B"]
    rate: float


def choose(
    probabilities: Float64[np.ndarray, "B N"],
    programs: Sequence[Program],
    costs: Costs,
    most: Int[np.ndarray, " B"] | None = None,
) -> Choice:
    """The choice of highest rate, the smallest program among equals.

    `probabilities[b, j]`: that the first j + 1 drafts of request b are all accepted. `most` bounds
    the drafts of each request. ValueError if no program has a row for every request.
    """
    batch, width = probabilities.shape
    # Drafts in order of probability, the earlier position first among equals.
    values = probabilities.T.ravel()
    order = np.argsort(-values, kind="stable")
    positions, requests = np.divmod(order, batch)
    if most is not None:
        allowed = positions < most[requests]
        order, positions, requests = order[allowed], positions[allowed], requests[allowed]
    best: tuple[float, Program] | None = None
    for depth in sorted({program.depth for program in programs}):
        within = values[order[positions < depth]] if depth < width else values[order]
        totals = np.concatenate(([0.0], np.cumsum(within)))
        for program in sorted(p for p in programs if p.depth == depth and p.most_requests >= batch):
            taken = min(program.rows - batch, len(within))
            rate = float(batch + totals[taken]) / costs.seconds(program)
            if best is None or rate > best[0]:
                best = rate, program
            if taken == len(within):
                break  # larger ones do no more
    if best is None:
        raise ValueError(f"no program has rows for {batch} requests: {tuple(programs)}")
    rate, program = best
    taken_by = requests[positions < program.depth][: program.rows - batch]
    return Choice(program, np.bincount(taken_by, minlength=batch), rate)
