"""A simulated engine: requests whose acceptance is known, steps that take what an H200 took.

Decoding requests verify the drafts that they hold and run as many modules as they are told;
modules that do not run fall behind, and beyond `WINDOW` positions only a restart helps: the text is
prefilled again, with all modules, and one token follows. New requests are prefilled with as many as
the controller says, or as the fixed number.
What a step emitted is observed one step late, as in the engine. Stalls and noise are in what the
controller is told; `tokens` and `seconds` are expectations, so that short runs can be compared.
"""

from __future__ import annotations

import numpy as np

from mmtp_jax.adaptive.controller import DraftController
from mmtp_jax.adaptive.costs import Program, StepCosts

N = 8
SLOTS = 256
WINDOW = 2 * (N + 1)
PROMPT = 128
# What modules hold that never come back.
NEVER = -(1 << 30)
# Rows of a step that prompts may fill.
MOST_ROWS = SLOTS * (N + 1) * 3 // 2

# SmolLM2-135M on one H200: milliseconds per step by batch, without drafts (8, 8, 64 and 256 rows)
# and with eight of each request (9, 72, 576 and 2304 rows).
BATCHES = np.array([1, 8, 64, 256])
PLAIN = np.array([0.785, 0.906, 1.07, 2.07])
DEEP = np.array([1.30, 1.55, 2.32, 4.65])
LEAST_ROWS = np.maximum(BATCHES, 8)
# Half of what drafts cost is due to their rows.
PER_ROW = (DEEP - PLAIN) / 2 / (8 * LEAST_ROWS)
PER_MODULE = (DEEP - PLAIN - PER_ROW * (9 * BATCHES - LEAST_ROWS)) / 8

NOISE = 0.03
STALLS = 0.002


def step_seconds(program: Program, batch: int) -> float:
    """Linear in depth and rows, interpolated between batches."""
    plain, row, module, least = (
        float(np.interp(batch, BATCHES, values))
        for values in (PLAIN, PER_ROW, PER_MODULE, LEAST_ROWS)
    )
    return (plain + module * program.depth + row * max(program.rows - least, 0)) / 1e3


def _programs() -> tuple[Program, ...]:
    made = []
    for depth in (0, 1, 2, 4, 8):
        full = SLOTS * (depth + 1)
        made += [Program(depth, 8 << i) for i in range(9) if 8 << i < full] + [Program(depth, full)]
        made += [Program(depth, 3 * full // 2)]
    return tuple(made)


PROGRAMS = _programs()


def measured() -> dict[Program, float]:
    """What a warm-up finds: a model of other form, without what requests cost."""
    return {
        Program(depth, rows): (0.63 + 0.001 * rows + depth * (0.055 + 3e-5 * rows)) / 1e3
        for depth, rows in PROGRAMS
    }


def new_controller() -> DraftController:
    return DraftController(SLOTS, N, PROGRAMS, StepCosts(measured()))


def drafts_of(controller: DraftController, slots: np.ndarray) -> np.ndarray:
    return np.array([controller.drafts(slot) for slot in slots.tolist()], np.int64)


def smallest(depth: int, rows: int, requests: int = 0) -> Program:
    """The program that a step with so deep drafts, so many rows and requests runs in."""
    fitting = (
        p for p in PROGRAMS if p.depth >= depth and p.rows >= rows and p.most_requests >= requests
    )
    return next(fitting, Program(N, -(-rows // SLOTS) * SLOTS))


class Simulation:
    """`load` requests in the first slots, whose drafts `drafts` decides: a controller or a number.

    `rates`: conditional acceptance, of all requests or by slot. Each request ends after `length`
    tokens (None: never) and another one takes its slot.
    """

    def __init__(
        self,
        load: int,
        rates: np.ndarray | float,
        drafts: DraftController | int,
        *,
        length: int | None = None,
        seed: int = 0,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.controller = drafts if isinstance(drafts, DraftController) else None
        self.fixed = N if isinstance(drafts, DraftController) else drafts
        self.length = length
        self.tokens = self.seconds = 0.0
        self.num_switches = self.num_restarts = 0
        self._decoding = np.zeros(SLOTS, bool)
        self._computed = np.full(SLOTS, PROMPT)
        self._exact = np.full((SLOTS, N), PROMPT)
        self._restarted = np.zeros(SLOTS, bool)
        self._end = np.zeros(SLOTS, np.int64)
        self._held = np.full(SLOTS, self.fixed)
        self._to_prefill: list[int] = []
        self._unseen: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        self.set_rates(rates)
        # They begin prefilled, and somewhere in the middle.
        self.load = load
        if length is not None:
            self._end[:load] = PROMPT + self.rng.integers(1, length + 1, load)
        for slot in range(load):
            self._admit(slot, self.fixed)

    def set_rates(self, rates: np.ndarray | float) -> None:
        by_slot = np.broadcast_to(np.asarray(rates, float), SLOTS)
        self.values = np.cumprod(np.repeat(by_slot[:, None], N, axis=1), axis=1)

    def set_load(self, load: int) -> None:
        """Requests of later slots end at once, or new ones start."""
        for slot in range(self.load, load):
            self._start(slot)
        self._decoding[load:] = False
        self._to_prefill = [slot for slot in self._to_prefill if slot < load]
        self.load = load

    def run(self, steps: int) -> float:
        """Tokens per second of so many steps."""
        tokens, seconds = self.tokens, self.seconds
        for _ in range(steps):
            self._step()
        return (self.tokens - tokens) / (self.seconds - seconds)

    def most(self, slots: np.ndarray) -> np.ndarray:
        """Drafts that the modules of each request are able to go on with."""
        depths = np.arange(1, N + 1)
        behind = self._computed[slots][:, None] - self._exact[slots]
        return np.where(behind + depths + 1 <= WINDOW, depths, 0).max(1)

    def _start(self, slot: int) -> None:
        """A new request waits for its prefill."""
        self._computed[slot] = PROMPT
        if self.length is not None:
            self._end[slot] = PROMPT + self.length
        self._wait(slot, restart=False)

    def _wait(self, slot: int, *, restart: bool) -> None:
        self._decoding[slot] = False
        self._restarted[slot] = restart
        self._to_prefill.append(slot)

    def _prefill_depth(self, slot: int) -> int:
        """Modules that run in the prefill of a request."""
        if self.controller is None or self._restarted[slot]:
            return self.fixed
        return self.controller.prefill_depth

    def _admit(self, slot: int, depth: int) -> None:
        """A request was prefilled with so many modules and emitted its next token."""
        self._decoding[slot] = True
        self._computed[slot] += 1
        self._exact[slot] = np.where(np.arange(N) < depth, self._computed[slot], NEVER)
        self._held[slot] = depth
        if self.controller is not None:
            self.controller.admitted(slot)

    def _step(self) -> None:
        slots = np.flatnonzero(self._decoding)
        drafts = self._drafts(slots)
        prefilled, chunk_rows = self._prefill(len(slots) + int(drafts.sum()))
        depths = [self._prefill_depth(slot) for slot in prefilled]
        depth = max([int(drafts.max(initial=0)), *depths])
        rows = len(slots) + int(drafts.sum()) + chunk_rows
        program = smallest(depth, rows, len(slots) + len(prefilled))
        seconds = step_seconds(program, len(slots) + len(prefilled))
        self.seconds += seconds
        self._tell(program, seconds, chunk_rows)
        self._decode(slots, drafts)
        self.tokens += len(prefilled)
        for slot, modules in zip(prefilled, depths, strict=True):
            self._admit(slot, modules)
        if self.length is not None:
            for slot in slots[self._computed[slots] >= self._end[slots]]:
                self._start(int(slot))
        if self.controller is not None:
            for slot in self.controller.restarts():
                if self._decoding[slot]:
                    self.num_restarts += 1
                    self._wait(slot, restart=True)

    def _drafts(self, slots: np.ndarray) -> np.ndarray:
        if self.controller is None:
            return np.full(len(slots), self.fixed)
        most, before = self.most(slots), self.controller.program
        self.controller.decide(slots, most, self._computed[slots])
        self.num_switches += before not in (None, self.controller.program)
        drafts = drafts_of(self.controller, slots)
        assert (drafts <= most).all()
        return drafts

    def _prefill(self, rows: int) -> tuple[list[int], int]:
        """As many whole texts as fit beside so many rows, but one if any waits; their rows."""
        prefilled: list[int] = []
        chunk_rows = 0
        for slot in self._to_prefill:
            length = int(self._computed[slot])
            if prefilled and rows + chunk_rows + length > MOST_ROWS:
                break
            prefilled.append(slot)
            chunk_rows += length
        del self._to_prefill[: len(prefilled)]
        return prefilled, chunk_rows

    def _decode(self, slots: np.ndarray, drafts: np.ndarray) -> None:
        drafted = np.minimum(drafts, self._held[slots])
        counts = np.arange(1, N + 1) <= drafted[:, None]
        values = self.values[slots] * counts
        accepted = (self.rng.random(len(slots))[:, None] < values).sum(1)
        self.tokens += len(slots) + float(values.sum())
        self._computed[slots] += accepted + 1
        ran = np.arange(N) < drafts[:, None]
        self._exact[slots] = np.where(ran, self._computed[slots][:, None], self._exact[slots])
        self._held[slots] = drafts
        self._unseen = slots, drafted, accepted

    def _tell(self, program: Program, seconds: float, chunk_rows: int) -> None:
        """The controller learns how long this step takes, and what the last one emitted."""
        if self.controller is None:
            return
        factor = 50.0 if self.rng.random() < STALLS else np.exp(NOISE * self.rng.normal())
        self.controller.took(program, float(seconds * factor), chunk_rows)
        if self._unseen is not None:
            slots, drafted, accepted = self._unseen
            keep = self._decoding[slots]
            self.controller.observed(slots[keep], drafted[keep], accepted[keep])
