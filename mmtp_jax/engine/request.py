"""One request as the host knows it, up to one step behind the device."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from mmtp_jax.cache.keys import PrefixKeys
from mmtp_jax.cache.manager import Admission, PageTables

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
    `left[m]` positions when they ran last. `exact` positions are those that all modules hold for
    good. `reuses_prefix` False computes every position, `max_chunk` bounds the rows of its prefill
    chunks. `awaits_result` keeps it out of a step while one that samples is unread: what the step
    is told depends on what came out.
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
    reuses_prefix: bool = True
    max_chunk: int | None = None
    awaits_result: bool = False
    in_flight: deque[ScheduledRequest] = field(default_factory=deque)
    rows_in_flight: int = 0
    samples_in_flight: int = 0
    proposed: int = 0
    held: int = 0
    left: list[int] = field(default_factory=list)
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
        over because some of them were left out of the newest step; 0 if none was."""
        modules = min(num_drafts, len(self.left))
        if modules <= self.proposed:
            return 0
        left = self.computed if modules <= self.held else self.left[modules - 1]
        return self.max_computed - max(left - (modules - 1), 0)

    @property
    def prefilling(self) -> bool:
        """Whether tokens known at admission are still to be scheduled."""
        return self.computed + self.rows_in_flight < self.prefill_end

    def start(self, slot: int, admission: Admission, num_modules: int) -> None:
        """Run from an admission, whose reused tokens are counted for the first incarnation."""
        self.status = RequestStatus.RUNNING
        self.slot = slot
        self.tables = admission.tables
        self.computed = admission.computed
        self.prefill_end = self.length
        self.held = num_modules
        self.left = [admission.computed] * num_modules
        self.exact = admission.exact
        if self.incarnation == 0:
            self.num_cached_tokens = admission.computed

    def dispatch(self, row: ScheduledRequest) -> None:
        """Take part in a step that is not read yet."""
        self.proposed = row.num_drafts
        self.in_flight.append(row)
        self.rows_in_flight += row.num_rows
        self.samples_in_flight += row.samples

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take over the oldest step in flight: it emitted `token_ids`."""
        row = self.in_flight.popleft()
        self.rows_in_flight -= row.num_rows
        self.samples_in_flight -= row.samples
        self.tokens.extend(token_ids)
        for module in range(row.num_drafts, min(self.held, len(self.left))):
            self.left[module] = self.computed
        self.held = row.num_drafts
        self.computed = len(self.tokens) - 1 if row.samples else self.computed + row.num_rows
        if row.num_drafts >= len(self.left):
            # After a prefix hit more may be held than this step says.
            exact = min(self.computed, len(self.tokens) - len(self.left))
            self.exact = max(self.exact, exact)

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
