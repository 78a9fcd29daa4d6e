"""One request as the host knows it, up to one step behind the device."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from mmtp_jax.cache.keys import PrefixKeys
from mmtp_jax.cache.manager import Admission, PageTables

# Further behind than any module comes back from.
LOST = 1 << 30

type FinishReason = Literal["stop", "length", "abort", "error"]


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Drafts(NamedTuple):
    """How many drafts of a request a step verifies and proposes, at most."""

    verify: int
    propose: int


class ScheduledRequest(NamedTuple):
    """One request's part of a step.

    `num_rows` target rows: the next known tokens if it `prefills`, else the newest token and up to
    `num_rows - 1` drafts; `num_drafts` are proposed for the next step; `samples` says whether a
    token follows from the rows. `entries` are new (index, page) page-table entries by cache group;
    `capacity` is the number of positions with pages.
    """

    request: Request
    incarnation: int
    slot: int
    num_rows: int
    num_drafts: int
    prefills: bool
    samples: bool
    capacity: int
    entries: Sequence[Sequence[tuple[int, int]]]

    @property
    def is_current(self) -> bool:
        """Whether output of this row still counts."""
        return self.incarnation == self.request.incarnation


@dataclass(eq=False, slots=True)
class Request:
    """Tokens, limits and progress of one request.

    `tokens` holds the prompt and the output read so far; `computed` counts the positions known to
    hold cache entries. During prefill both are exact for steps in flight too; once a step in flight
    samples, the device may be ahead by up to that step's rows. `incarnation` changes at every
    preemption and at the end: output of an earlier one is dropped. `in_flight`: its parts of the
    steps that are dispatched and not read. `proposed` drafts come from the newest of these, or came
    from the last; `held` from the newest step that was read: modules beyond had run over the first
    `left[m]` positions when they ran last. Modules from `depth` on were left out for too long and
    do not run again; the others hold `exact` positions for good. `wants_all` lets all modules run
    in its prefills, `reuses_prefix` False computes every position, `max_chunk` bounds the rows
    of its prefill chunks. `awaits_result` keeps it out of a step while one that samples is unread:
    what the step is told depends on what came out.
    """

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int
    limit: int
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    arrival: int = -1
    incarnation: int = 0
    slot: int = -1
    computed: int = 0
    prefill_end: int = 0
    num_cached_tokens: int = 0
    wants_all: bool = False
    reuses_prefix: bool = True
    max_chunk: int | None = None
    awaits_result: bool = False
    in_flight: deque[ScheduledRequest] = field(default_factory=deque)
    rows_in_flight: int = 0
    samples_in_flight: int = 0
    proposed: int = 0
    held: int = 0
    left: list[int] = field(default_factory=list)
    depth: int = 0
    exact: int = 0
    keys: PrefixKeys | None = None
    tables: PageTables | None = None

    @classmethod
    def create(
        cls, request_id: str, prompt_ids: Sequence[int], max_tokens: int | None, max_model_len: int
    ) -> Request:
        """A new request (`max_tokens` None: up to max_model_len); ValueError if none would fit."""
        length = len(prompt_ids)
        if length == 0:
            raise ValueError("prompt must have at least 1 token, got 0")
        if length >= max_model_len:
            raise ValueError(
                f"prompt has {length} tokens, but max_model_len={max_model_len} leaves room for at"
                f" most {max_model_len - 1}"
            )
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {max_tokens}")
        limit = max_model_len if max_tokens is None else min(length + max_tokens, max_model_len)
        return cls(request_id, list(prompt_ids), length, limit)

    @property
    def prompt_ids(self) -> list[int]:
        return self.tokens[: self.num_prompt_tokens]

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    @property
    def length(self) -> int:
        """Committed tokens read so far."""
        return len(self.tokens)

    @property
    def min_length(self) -> int:
        """Committed tokens once the steps in flight ran, at least: each sampling one emits a token
        unless the request ends."""
        return len(self.tokens) + self.samples_in_flight

    @property
    def max_computed(self) -> int:
        """Computed positions once the steps in flight ran, at most; exact during prefill."""
        return self.computed + self.rows_in_flight

    def behind(self, num_drafts: int) -> int:
        """Positions below `max_computed`, at most, that the modules for so many drafts must run
        over because some of them were left out of the newest step; 0 if none was, `LOST` if one
        does not run any more."""
        if num_drafts <= self.proposed:
            return 0
        modules = min(num_drafts, len(self.left))
        if modules > self.depth:
            return LOST
        if modules <= self.proposed:
            return 0
        if modules <= self.held:
            return self.max_computed - max(self.computed - (modules - 1), 0)
        return self.max_computed - self._resumes(modules)

    def most_modules(self, behind: int) -> int:
        """The modules, from the first on, that can run in the next step because none is more than
        `behind` positions behind."""
        modules = self.depth
        while modules > self.proposed and self.behind(modules) > behind:
            modules -= 1
        return modules

    @property
    def prefilling(self) -> bool:
        """Whether tokens known at admission are still to be scheduled."""
        return self.computed + self.rows_in_flight < self.prefill_end

    def start(self, slot: int, admission: Admission, num_modules: int, depth: int) -> None:
        """Run from an admission, whose reused tokens are counted for the first incarnation, with
        the first `depth` modules."""
        self.status = RequestStatus.RUNNING
        self.slot = slot
        self.tables = admission.tables
        self.computed = admission.computed
        self.prefill_end = self.length
        self.held = num_modules
        self.left = [admission.computed] * num_modules
        self.depth = depth
        self.exact = admission.exact
        if self.incarnation == 0:
            self.num_cached_tokens = admission.computed

    def dispatch(self, row: ScheduledRequest) -> None:
        """Take part in a step that is not read yet."""
        self.proposed = row.num_drafts
        self.in_flight.append(row)
        self.rows_in_flight += row.num_rows
        self.samples_in_flight += row.samples

    def advance(self, token_ids: Sequence[int], behind: int) -> None:
        """Take over the oldest step in flight: it emitted `token_ids`. Modules that are more than
        `behind` positions behind do not run again."""
        row = self.in_flight.popleft()
        self.rows_in_flight -= row.num_rows
        self.samples_in_flight -= row.samples
        self.tokens.extend(token_ids)
        if row.num_drafts < self.held:
            for module in range(row.num_drafts, min(self.held, len(self.left))):
                self.left[module] = self.computed
        self.held = row.num_drafts
        self.computed = len(self.tokens) - 1 if row.samples else self.computed + row.num_rows
        if row.num_drafts < self.depth:
            self._lose_modules(behind)
        if row.num_drafts >= self.depth:
            exact = min(self.computed, len(self.tokens) - len(self.left))
            # After a prefix hit more may be held than this step says.
            if exact > self.exact:
                self.exact = exact

    def _lose_modules(self, behind: int) -> None:
        """Leave out for good what is too far behind, and does not come back in a step in flight."""
        coming = max([row.num_drafts for row in self.in_flight], default=0)
        least = max(self.held, coming)
        while self.depth > least and self.computed - self._resumes(self.depth) > behind:
            self.depth -= 1

    def _resumes(self, depth: int) -> int:
        """The first position that so many modules run over if the last was left out."""
        return max(self.left[depth - 1] - (depth - 1), 0)

    def wait(self) -> None:
        """Back to waiting, without slot and cache entries."""
        self._stop(RequestStatus.WAITING)
        self.computed = 0

    def preempt(self) -> None:
        """Wait and start again later: tokens stay, the output in flight is lost."""
        self.incarnation += 1
        self.wait()

    def finish(self, reason: FinishReason) -> None:
        self.incarnation += 1
        self.finish_reason = reason
        self._stop(RequestStatus.FINISHED)

    def _stop(self, status: RequestStatus) -> None:
        self.status = status
        self.slot = -1
        self.tables = None
        self.in_flight.clear()
        self.rows_in_flight = self.samples_in_flight = self.proposed = 0
