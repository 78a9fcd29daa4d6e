"""How likely drafts are to be accepted, by request and position, learnt from verifications.

A position's rate is conditional: that of its draft where all earlier ones were accepted. Each is
known for the whole engine, and for each request as far as the request's own verifications tell.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int

# The rates that an engine begins with: drafts are tried until they are known to fail.
INITIAL_RATE = 0.7
INITIAL_WEIGHT = 2.0
# The engine's rates are averages over about so many steps in which the position was tried, so
# they follow a change as fast at batch 1 as at 256 ...
GLOBAL_MEMORY = 128
# ... and where a position is not tried any more, they come to weigh as little as so many trials:
# a probe then counts for something.
LEAST_WEIGHT = 32.0
# A request's own rates are averages over about so many of its trials of the position, and weigh
# as much as the engine's after SHRINKAGE of them.
SLOT_MEMORY = 64
SHRINKAGE = 8.0


class AcceptanceEstimate:
    """Running rates of `num_slots` requests and `num_drafts` positions."""

    def __init__(self, num_slots: int, num_drafts: int) -> None:
        self.num_drafts = num_drafts
        self._tried = np.full(num_drafts, INITIAL_WEIGHT)
        self._accepted = INITIAL_RATE * self._tried
        self._slot_tried = np.zeros((num_slots, num_drafts))
        self._slot_accepted = np.zeros((num_slots, num_drafts))

    def reset(self, slot: int) -> None:
        """Another request has the slot."""
        self._slot_tried[slot] = self._slot_accepted[slot] = 0.0

    def count(
        self,
        slots: Int[np.ndarray, " B"],
        drafted: Int[np.ndarray, " B"],
        accepted: Int[np.ndarray, " B"],
    ) -> None:
        """One step of different slots: of `drafted` drafts, the first `accepted` matched.

        What follows the first mismatch was verified but says nothing.
        """
        positions = np.arange(self.num_drafts)
        tried = positions < np.minimum(accepted + 1, drafted)[:, None]
        matched = positions < accepted[:, None]
        keep = 1.0 - tried / SLOT_MEMORY
        self._slot_tried[slots] = self._slot_tried[slots] * keep + tried
        self._slot_accepted[slots] = self._slot_accepted[slots] * keep + matched
        least = np.minimum(self._tried, LEAST_WEIGHT)
        keep = np.maximum(1.0 - 1.0 / GLOBAL_MEMORY, least / self._tried)
        self._tried = self._tried * keep + tried.sum(0)
        self._accepted = self._accepted * keep + matched.sum(0)

    def probabilities(self, slots: Int[np.ndarray, " B"]) -> Float64[np.ndarray, "B N"]:
        """P(the first n drafts are all accepted) for n = 1..N, so it never rises with n."""
        engine = self._accepted / self._tried
        rates = (self._slot_accepted[slots] + SHRINKAGE * engine) / (
            self._slot_tried[slots] + SHRINKAGE
        )
        return np.cumprod(rates, axis=1)
