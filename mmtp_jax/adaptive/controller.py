"""Adaptive draft lengths: decides, step by step, how many drafts of each request to verify.

The program of highest expected rate runs until another one is better. Modules that a request does
not run fall behind, which bounds what it may verify (`most`) until it is restarted; restarts are
asked for where they pay. Where prompts keep coming, modules beyond the program's are left out of
their prefills too. What is not tried is not learnt, so new requests verify all drafts they can at
first, now and then one is prefilled with all modules, or restarted, to try all, and a few steps go
without drafts. All this is paid from a small share of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int, Int64

from mmtp_jax.adaptive.acceptance import AcceptanceEstimate
from mmtp_jax.adaptive.choice import Choice, choose
from mmtp_jax.adaptive.costs import Program, StepCosts
from mmtp_jax.adaptive.mixed import MixedCosts

# Steps from one decision to the next, and to the one after a change: soon enough to go back before
# modules are too far behind.
INTERVAL = 16
SHORT_INTERVAL = 4
# A decision is due, too, when the number of requests changed by more than this part.
BATCH_CHANGE = 1 / 8
# What programs took counts until the number of requests changed by more than this factor.
COSTS_CHANGE = 2
# Another program has to promise so much more than the running one.
PROGRAM_GAIN = 1.01
# A restart costs everyone steps with its rows. It has to promise the request so much more, and
# together they have to pay within so many steps; as long, a request is not restarted again.
RESTART_GAIN = 1.05
RESTART_HORIZON = 128
# At most this part of the batch at once.
RESTART_PART = 1 / 8
# The share of the time that goes into verifying more than is expected to pay, how many steps' worth
# of it can be saved up, and in how many verifications a request does so.
EXPLORED_SHARE = 0.008
MOST_SAVED = 32
EXPLORED = 4
# Steps without drafts, which tell what plain decoding costs now; the step of the first, and the
# steps from one such time to another.
PLAIN_STEPS = 4
FIRST_PLAIN = 32
PLAIN_INTERVAL = 512


class _Decoding(NamedTuple):
    """Requests of a step: their slots, the most drafts that each can go on with, and the rows that
    a restart of each prefills (-1: it is not possible)."""

    slots: Int[np.ndarray, " B"]
    most: Int[np.ndarray, " B"]
    restart_rows: Int[np.ndarray, " B"]


class DraftController:
    """Chooses among `programs` for the requests in slots 0..num_slots-1.

    ValueError if no program has depth 0 or none has depth `num_drafts`. `observed` and `took` may
    lag behind `decide`, but what was observed of a slot's earlier request must not follow the
    `admitted` of a later one.
    """

    def __init__(
        self, num_slots: int, num_drafts: int, programs: Sequence[Program], costs: StepCosts
    ) -> None:
        depths = {program.depth for program in programs}
        if not {0, num_drafts} <= depths:
            raise ValueError(f"programs must have depths 0 and {num_drafts}, got {sorted(depths)}")
        self.estimate = AcceptanceEstimate(num_slots, num_drafts)
        self.program: Program | None = None
        self._num_drafts = num_drafts
        self._programs = tuple(programs)
        self._most_requests = max(program.most_requests for program in programs)
        self._costs = costs
        self._mixed = MixedCosts(programs, num_drafts, costs)
        # By slot: drafts as decided and of the next step, verifications since the admission (or
        # since it was asked for a restart), and those left in which all drafts are tried.
        self._settled = np.zeros(num_slots, np.int64)
        self._next = self._settled.tolist()
        self._verified = np.zeros(num_slots, np.int64)
        self._to_explore = np.zeros(num_slots, np.int64)
        # The number of requests at the last decision, and when what programs took began to count.
        self._batch = 0
        self._costs_batch = 0
        # Drafts of a request that is admitted now.
        self._typical = num_drafts
        # Modules that run in prefills, and whether all do for once, to try them.
        self._prefill_depth = num_drafts
        self._tries_all = False
        self._restarts: list[int] = []
        self._steps_left = 0
        self._plain_left = 0
        self._since_plain = PLAIN_INTERVAL - FIRST_PLAIN
        # Seconds to spend, and admissions within the last RESTART_HORIZON steps.
        self._saved = 0.0
        self._arrivals = 0.0

    def admitted(self, slot: int) -> None:
        """A request has the slot, and its prefill begins: with all modules if it was restarted
        because it ought to be, else with `prefill_depth`."""
        if self._tries_all:
            self._tries_all = False
            self._saved -= self._deep_prefill_seconds()
        self.estimate.reset(slot)
        self._settled[slot] = self._typical
        self._verified[slot] = 0
        self._to_explore[slot] = EXPLORED
        self._arrivals += 1

    def observed(
        self,
        slots: Int[np.ndarray, " B"],
        drafted: Int[np.ndarray, " B"],
        accepted: Int[np.ndarray, " B"],
    ) -> None:
        """One step of different slots: of `drafted` drafts, the first `accepted` matched."""
        self.estimate.count(slots, drafted, accepted)
        self._verified[slots] += 1
        self._to_explore[slots] -= self._to_explore[slots] > 0

    def took(
        self, program: Program, seconds: float, chunk_rows: int = 0, waited: bool = True
    ) -> None:
        """A step of `program` took so long, and the host `waited` for the device or not;
        `chunk_rows` of its rows were of prompts."""
        self._costs.observe(program, seconds, waited)
        self._mixed.count(chunk_rows)
        self._arrivals *= 1 - 1 / RESTART_HORIZON
        if self.program is not None:
            usual = self._costs.seconds(self.program)
            self._saved = min(self._saved + EXPLORED_SHARE * usual, MOST_SAVED * usual)

    def decide(
        self,
        slots: Int[np.ndarray, " B"],
        most: Int[np.ndarray, " B"],
        restart_rows: Int[np.ndarray, " B"],
    ) -> None:
        """Settle the drafts of the next step, in which `slots` decode; `most` bounds each. A
        restart prefills `restart_rows`; -1: it is not possible.

        The first are served first: those beyond what a program has room for get no row.
        """
        if len(slots) == 0:
            return
        room = self._most_requests
        decoding = _Decoding(slots[:room], most[:room], restart_rows[:room])
        slots, most, _ = decoding
        self._steps_left -= 1
        self._since_plain += 1
        if self._is_due(slots):
            self._decide(decoding)
        if self._plain_left > 0:
            self._plain_left -= 1
            drafts = np.zeros_like(most)
        else:
            drafts = np.minimum(self._settled[slots], most)
            exploring = self._to_explore[slots] > 0
            if exploring.any():
                drafts = self._explore(drafts, np.where(exploring, most, drafts))
        settled = self._settled.copy()
        settled[slots] = drafts
        self._next = settled.tolist()

    @property
    def prefill_depth(self) -> int:
        """The modules that run in the prefill of a request that is admitted in the next step."""
        return self._num_drafts if self._tries_all else self._prefill_depth

    def drafts(self, slot: int) -> int:
        """Drafts to verify of a request in the next step."""
        return self._next[slot]

    def restarts(self) -> list[int]:
        """Slots whose requests ought to be prefilled again; each is named once."""
        restarts, self._restarts = self._restarts, []
        return restarts

    def _is_due(self, slots: Int[np.ndarray, " B"]) -> bool:
        """Whether it is time, or the last decision does not fit these requests."""
        batch = len(slots)
        return (
            self.program is None
            or self._steps_left <= 0
            or abs(batch - self._batch) > BATCH_CHANGE * self._batch
            or batch + int(self._settled[slots].sum()) > self.program.rows
        )

    def _decide(self, decoding: _Decoding) -> None:
        slots, most, _ = decoding
        batch = len(slots)
        self._mixed.num_requests = batch
        if not self._costs_batch / COSTS_CHANGE <= batch <= self._costs_batch * COSTS_CHANGE:
            self._costs.forget()
            self._costs_batch = batch
            self._since_plain = PLAIN_INTERVAL - FIRST_PLAIN
        probabilities = self.estimate.probabilities(slots)
        choice = self._choose(probabilities, most)
        choice, typical = self._renew(decoding, probabilities, choice)
        if self.program is None:
            # The first requests may try all drafts.
            deep = self._deep_seconds(batch * (self._num_drafts + 1))
            self._saved = EXPLORED * (deep - self._mixed.seconds(choice.program))
        changed, self.program = choice.program != self.program, choice.program
        self._prefill_depth = self._mixed.prefill_depth(choice.program)
        self._settled[slots] = choice.drafts
        self._typical = int(typical.sum()) // batch
        self._batch = batch
        if choice.program.depth == 0:
            self._since_plain = 0
        elif self._since_plain >= PLAIN_INTERVAL:
            self._since_plain, self._plain_left = 0, PLAIN_STEPS
        if self._prefill_depth < self._num_drafts:
            self._try_all()
        elif choice.drafts.max() < self._num_drafts:
            self._probe(decoding)
        soon = changed or self._plain_left > 0 or len(self._restarts) > 0
        self._steps_left = SHORT_INTERVAL if soon else INTERVAL

    def _choose(
        self, probabilities: Float64[np.ndarray, "B N"], most: Int[np.ndarray, " B"]
    ) -> Choice:
        """The best choice, or the running program unless that is clearly worse."""
        best = choose(probabilities, self._programs, self._mixed, most)
        if self.program is None or self.program.most_requests < len(most):
            return best
        kept = choose(probabilities, (self.program,), self._mixed, most)
        return best if best.rate > PROGRAM_GAIN * kept.rate else kept

    def _renew(
        self,
        decoding: _Decoding,
        probabilities: Float64[np.ndarray, "B N"],
        choice: Choice,
    ) -> tuple[Choice, Int64[np.ndarray, " B"]]:
        """`choice`, or the better one of requests that were not bounded, where it pays to get
        there; and the drafts of such requests.

        Where at least half of the requests are replaced within the horizon, it is enough to wait.
        Elsewhere they are restarted, a few at a time. The better program runs meanwhile: those that
        are free to use it would fall behind again without.
        """
        slots, most, restart_rows = decoding
        replaced = 2 * self._arrivals >= len(slots)
        able = (restart_rows >= 0) & (self._verified[slots] >= RESTART_HORIZON)
        renewable = replaced | able
        bounded = renewable & (most < self._num_drafts)
        if not bounded.any():
            return choice, choice.drafts
        free = np.where(bounded, self._num_drafts, most)
        better = choose(probabilities, self._programs, self._mixed, free)
        gain = better.rate / choice.rate - 1
        if not replaced:
            gains = _tokens(probabilities, better.drafts) / _tokens(probabilities, choice.drafts)
            behind = (gains > RESTART_GAIN) & (better.drafts > most)
            count = int(behind.sum())
            if count == 0:
                return choice, choice.drafts
            rows = len(slots) + int(restart_rows[behind].mean())
            cost = count * self._deep_seconds(rows) / self._mixed.seconds(choice.program)
            if gain * RESTART_HORIZON <= cost:
                return choice, choice.drafts
            first = np.argsort(np.where(behind, -gains, 0.0), kind="stable")
            at_once = max(1, int(RESTART_PART * len(slots)))
            self._ask_for_restart(slots[first[: min(count, at_once)]])
        elif gain <= (PROGRAM_GAIN if better.program == self.program else RESTART_GAIN) - 1:
            return choice, choice.drafts
        clipped = np.minimum(better.drafts, most)
        return Choice(better.program, clipped, better.rate), better.drafts

    def _ask_for_restart(self, slots: Int[np.ndarray, " b"]) -> None:
        self._restarts.extend(slots.tolist())
        self._verified[slots] = 0
        self._arrivals -= len(slots)

    def _try_all(self) -> None:
        """Let the next request that comes try all drafts, once that is affordable."""
        assert self.program is not None
        deep = self._deep_seconds(self.program.rows)
        steps = EXPLORED * (deep - self._costs.seconds(self.program))
        self._tries_all = self._deep_prefill_seconds() + steps <= self._saved

    def _deep_prefill_seconds(self) -> float:
        """What a step with a prompt takes longer if all modules run in it."""
        assert self.program is not None
        rows = self.program.rows + self._mixed.chunk_rows
        return self._deep_seconds(rows) - self._mixed.step_seconds(self.program.depth, rows)

    def _probe(self, decoding: _Decoding) -> None:
        """Let the request that has decoded for longest try all drafts, once that is affordable."""
        slots, most, restart_rows = decoding
        able = (most >= self._num_drafts) | (restart_rows >= 0)
        exploring = (self._to_explore[slots] > 0) & (most >= self._num_drafts)
        if self._restarts or exploring.any() or not able.any():
            return
        assert self.program is not None
        batch = len(slots)
        deep = self._deep_seconds(batch + self._num_drafts)
        extra = EXPLORED * (deep - self._mixed.seconds(self.program))
        oldest = int(np.argmax(np.where(able, self._verified[slots], -1)))
        restart = 0.0
        if most[oldest] < self._num_drafts:
            restart = deep + self._deep_seconds(batch + int(restart_rows[oldest]))
        if self._saved < restart + extra:
            return
        self._saved -= restart
        if restart:
            self._ask_for_restart(slots[oldest : oldest + 1])
        else:
            self._verified[slots[oldest]] = 0
            self._to_explore[slots[oldest]] = EXPLORED

    def _explore(
        self, drafts: Int[np.ndarray, " B"], deeper: Int[np.ndarray, " B"]
    ) -> Int[np.ndarray, " B"]:
        """`deeper` instead of `drafts`, if that is affordable."""
        assert self.program is not None
        deep = self._mixed.step_seconds(int(deeper.max()), len(deeper) + int(deeper.sum()))
        extra = max(deep - self._costs.seconds(self.program), 0.0)
        if self._saved <= 0 < extra:
            return drafts
        self._saved -= extra
        return deeper

    def _deep_seconds(self, rows: int) -> float:
        """What a step of so many rows takes in which all modules run."""
        return self._mixed.step_seconds(self._num_drafts, rows)


def _tokens(
    probabilities: Float64[np.ndarray, "B N"], drafts: Int64[np.ndarray, " B"]
) -> Float64[np.ndarray, " B"]:
    """What each request is expected to emit."""
    taken = np.arange(probabilities.shape[1]) < drafts[:, None]
    return 1.0 + (probabilities * taken).sum(1)
