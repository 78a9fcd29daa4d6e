"""Which requests run in the next step, on which pages: continuous batching with chunked prefill.

Steps may be scheduled while earlier ones are in flight. The host then knows a decoding request's
position only up to a bound, so it reserves pages for the bound; the device clips to what it was
given. Slots and pages that were given back can be issued in the very next step, because the device
runs steps in order. Output is matched by request and incarnation: that of a request which ended or
was preempted meanwhile is dropped.
"""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from operator import attrgetter

from mmtp_jax.cache.manager import CacheManager
from mmtp_jax.config import require
from mmtp_jax.engine.buckets import Bucket
from mmtp_jax.engine.request import (
    Drafts,
    FinishReason,
    Request,
    RequestStatus,
    ScheduledRequest,
)
from mmtp_jax.engine.scheduled import Part, ScheduledAdmission, ScheduledStep, StepSoFar
from mmtp_jax.engine.scheduler_config import SchedulerConfig

_ARRIVAL = attrgetter("arrival")

# Beside requests that decode, prompts take so many steps, or fewer where rows are to spare.
PREFILL_STEPS = 4


class Scheduler:
    """First come, first served: `waiting` and `running` are in order of arrival, and all of
    `running` arrived before what waits, restarts aside.

    `chunk_policy(request, limit)` may choose prefill chunks of 1..limit rows, `draft_policy` the
    numbers of drafts to verify and to propose for a request that decodes
    (0..num_speculative_tokens), and `depth_policy` how many modules run in the prefill of one that
    is admitted (all: as many as there are or more). Fewer are proposed while modules that were left
    out are too far behind, or the step has no rows for them.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        chunk_policy: Callable[[Request, int], int] | None = None,
        draft_policy: Callable[[Request], Drafts] | None = None,
        depth_policy: Callable[[Request], int] | None = None,
    ) -> None:
        require(
            config.max_num_batched_tokens >= cache.num_modules,
            f"max_num_batched_tokens ({config.max_num_batched_tokens}) must be at least the number"
            f" of MTP modules ({cache.num_modules})",
        )
        for group in cache.groups:
            rows = config.max_rows + config.lookahead
            needed = group.pages_for_one_request(cache.behind, config.max_model_len, rows)
            require(
                group.num_pages - 1 >= needed,
                f"num_pages must be >= {needed + 1} for one request of"
                f" max_model_len={config.max_model_len}, got {group.num_pages} in the cache group"
                f" {group.name!r}: raise num_pages or cache_bytes, or lower max_model_len",
            )
        self.config = config
        self.cache = cache
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._requests: dict[str, Request] = {}
        # What every step looks up for every request.
        self._all_drafts = Drafts(config.num_speculative_tokens, config.num_speculative_tokens)
        self._num_modules = cache.num_modules
        # Rows of prompts that a step has at least, until none are left.
        self._chunk_rows = 0
        self._arrivals = 0
        self._steps = 0
        self._free_slots = list(range(config.max_num_seqs))
        self._chunk_policy = chunk_policy
        self.draft_policy = draft_policy
        self.depth_policy = depth_policy

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queue a new request; ValueError if its id is in use or it exceeds max_model_len."""
        if request.request_id in self._requests:
            raise ValueError(f"request_id {request.request_id!r} is already in use")
        if not 0 < request.length < request.limit <= self.config.max_model_len:
            raise ValueError(
                f"request of {request.length} tokens and limit {request.limit} does not fit"
                f" max_model_len={self.config.max_model_len}"
            )
        request.arrival = self._arrivals
        request.keys = self.cache.prefix_keys(request.tokens)
        self._arrivals += 1
        self._requests[request.request_id] = request
        self.waiting.append(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request at any time; its output in flight is dropped. None if it is not known."""
        return self.finish(request_id, "abort")

    def finish(self, request_id: str, reason: FinishReason) -> Request | None:
        """End a request between two calls, e.g. at a stop string. None if it is not known."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, reason)
        return request

    def restart(self, request: Request) -> None:
        """Let a running request begin again where its cached prefix ends: modules that were left
        out are then brought back by a prefill. Output in flight is computed anew."""
        self._release(request)
        request.preempt()
        bisect.insort(self.waiting, request, key=_ARRIVAL)

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None if nothing can run before an earlier step is read."""
        interval = self.config.steps_per_reserve
        plan = StepSoFar(
            self.config.max_num_batched_tokens,
            reserves_ahead=interval > 0 and self._steps % interval == 0,
        )
        # Decodes come first, both kinds in order of arrival. A preemption changes `running`.
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for request in self.running:
            (prefilling if request.prefilling else decoding).append(request)
        for request in decoding:
            if request.status is RequestStatus.RUNNING:
                self._schedule_running(request, plan)
        self._limit_chunks(prefilling, plan)
        for request in prefilling:
            if request.status is RequestStatus.RUNNING:
                self._schedule_running(request, plan)
        # Pages that a preemption freed go to the requests it was for.
        while self.waiting and self._free_slots and not plan.preempted:
            if not self._admit(self.waiting[0], plan):
                break
        if not plan.requests:
            return None
        self._steps += 1
        requests = tuple(plan.requests.values())
        return ScheduledStep(tuple(plan.admissions), requests, self._bucket(requests, plan.cost))

    def _limit_chunks(self, prefilling: Sequence[Request], plan: StepSoFar) -> None:
        """Bound the rows of prompts beside requests that decode, which wait for the whole step: to
        what the smallest program has that gets through all prompts in a few steps."""
        left = sum(request.prefill_end - request.max_computed for request in prefilling)
        left += sum(request.length for request in islice(self.waiting, len(self._free_slots)))
        if left == 0:
            self._chunk_rows = 0
            return
        least = max(-(-left // PREFILL_STEPS), self._num_modules)
        self._chunk_rows = max(self._chunk_rows, least)
        if plan.requests:
            drafts = [row.num_drafts for row in plan.requests.values()]
            drafts += [self._prefill_drafts(request.depth) for request in prefilling]
            if self.waiting and self._free_slots:
                drafts.append(self._prefill_drafts(self._depth(self.waiting[0])))
            rows, deepest = plan.cost + self._chunk_rows, max(drafts)
            requests = len(plan.requests) + len(prefilling)
            requests += min(len(self.waiting), len(self._free_slots))
            fitting = (
                bucket.num_rows
                for bucket in self.config.buckets
                if bucket.num_drafts >= deepest
                and bucket.num_rows >= rows
                and bucket.num_requests >= requests
            )
            plan.budget = min(plan.budget, next(fitting, plan.budget + plan.cost) - plan.cost)

    def _bucket(self, requests: Sequence[ScheduledRequest], cost: int) -> Bucket:
        """The smallest program, of those with the fewest modules, that can run a step."""
        drafts = max([row.num_drafts for row in requests])
        return next(
            bucket
            for bucket in self.config.buckets
            if bucket.num_drafts >= drafts
            and bucket.num_rows >= cost
            and bucket.num_requests >= len(requests)
        )

    def update(
        self,
        row: ScheduledRequest,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
    ) -> bool:
        """Take over what a step emitted for a request whose row `is_current`, and why it ended
        there if not by reaching its limit. Steps and their rows in order.

        Returns whether the request ended.
        """
        request = row.request
        request.advance(token_ids, self.cache.behind)
        tables, computed = request.tables, request.computed
        assert tables is not None
        self.cache.publish(tables, computed, request.exact, request.depth)
        self.cache.retire(tables, computed)
        if finish_reason is None:
            if len(request.tokens) < request.limit:
                return False
            finish_reason = "length"
        self._end(request, finish_reason)
        return True

    def _schedule_running(self, request: Request, plan: StepSoFar) -> None:
        """Give a running request rows if it has any to run, preempting later arrivals for pages."""
        part = self._part(request, plan)
        while part is not None and not self._add(request, part, plan):
            if len(self.running) == 1:
                return  # pages outside its windows come back when the steps in flight are read
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is request:
                return

    def _part(self, request: Request, plan: StepSoFar) -> Part | None:
        """What the next step can give a request."""
        if request.awaits_result and request.samples_in_flight:
            return None
        if len(plan.requests) >= self.config.buckets[-1].num_requests:
            return None
        part = self._chunk(request, plan) if request.prefilling else self._window(request, plan)
        return part if part.num_rows > 0 and part.cost <= plan.budget else None

    def _chunk(self, request: Request, plan: StepSoFar) -> Part:
        """The next rows of a prefill."""
        chunk = min(request.prefill_end - request.max_computed, plan.budget)
        if self.config.max_chunk is not None:
            chunk = min(chunk, self.config.max_chunk)
        if request.max_chunk is not None:
            chunk = min(chunk, request.max_chunk)
        if chunk > 0 and self._chunk_policy is not None:
            chunk = self._chunk_policy(request, chunk)
        return Part(chunk, self._prefill_drafts(request.depth), max(chunk, request.depth))

    def _window(self, request: Request, plan: StepSoFar) -> Part:
        """The newest token of a request that decodes, with drafts."""
        verify, propose = self._all_drafts
        if self.draft_policy is not None:
            verify, propose = self.draft_policy(request)
            if verify > request.proposed:
                verify = request.proposed
        num_rows = verify + 1
        left = request.limit - request.min_length
        if num_rows > left:
            num_rows = left
        behind = request.behind(propose)
        if behind and (behind > self.cache.behind or num_rows + behind > plan.budget):
            propose, behind = request.proposed, 0
        least = propose if propose < self._num_modules else self._num_modules
        cost = num_rows + behind
        return Part(num_rows, propose, cost if cost > least else least)

    def _add(self, request: Request, part: Part, plan: StepSoFar) -> bool:
        """Reserve pages and add the request to the step; False if out of pages."""
        tables = request.tables
        assert tables is not None
        num_rows, num_drafts, cost = part
        end = request.computed + request.rows_in_flight + num_rows
        prefills, samples = request.prefilling, end >= request.prefill_end
        needed = end + self.config.lookahead
        if needed >= request.limit:
            needed = request.limit - 1
        entries: Sequence[Sequence[tuple[int, int]]] = ()
        if needed > tables.capacity or (plan.reserves_ahead and samples):
            ahead = min(needed + self.config.ahead, request.limit - 1) if samples else needed
            reserved = self.cache.reserve(tables, needed, ahead)
            if reserved is None:
                return False
            entries = reserved
        # A decoding request's part is mostly that of the step before: the same tuple then tells
        # that nothing changed.
        row = request.in_flight[-1] if request.in_flight else None
        if (
            row is None
            or row.num_rows != num_rows
            or row.num_drafts != num_drafts
            or row.prefills is not prefills
            or row.samples is not samples
            or row.capacity != tables.capacity
            or row.entries
        ):
            row = ScheduledRequest(
                request,
                request.incarnation,
                request.slot,
                num_rows,
                num_drafts,
                prefills,
                samples,
                tables.capacity,
                entries,
            )
        plan.requests[request.request_id] = row
        plan.costs[request.request_id] = cost
        plan.budget -= cost
        plan.cost += cost
        request.dispatch(row)
        return True

    def _admit(self, request: Request, plan: StepSoFar) -> bool:
        """Give the head of the queue a slot and its first chunk; False if it does not fit."""
        assert request.keys is not None
        if plan.budget < max(self.cache.num_modules, 1):
            return False
        depth = self._depth(request)
        admission = self.cache.admit(request.keys, reuse=request.reuses_prefix, depth=depth)
        if admission is None:
            return False
        request.start(self._free_slots[0], admission, self._num_modules, depth)
        part = self._part(request, plan)
        if part is None or not self._add(request, part, plan):
            self.cache.free(admission.tables)
            request.wait()
            return False
        heapq.heappop(self._free_slots)
        self.waiting.popleft()
        bisect.insort(self.running, request, key=_ARRIVAL)
        plan.admissions.append(ScheduledAdmission(request.slot, request, admission))
        return True

    def _depth(self, request: Request) -> int:
        """The modules that run in the prefill of a request that is admitted now."""
        if self.depth_policy is None:
            return self._num_modules
        return min(self.depth_policy(request), self._num_modules)

    def _prefill_drafts(self, depth: int) -> int:
        """The drafts that a prefill with so many modules proposes."""
        return self.config.num_speculative_tokens if depth >= self._num_modules else depth

    def _preempt(self, request: Request, plan: StepSoFar) -> None:
        """Take a running request's pages and slot, and its rows if it has some in this step."""
        if plan.requests.pop(request.request_id, None) is not None:
            cost = plan.costs.pop(request.request_id)
            plan.budget += cost
            plan.cost -= cost
        plan.preempted = True
        self.num_preemptions += 1
        self.restart(request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        del self._requests[request.request_id]
        if request.status is RequestStatus.RUNNING:
            self._release(request)
        else:
            self.waiting.remove(request)
        request.finish(reason)

    def _release(self, request: Request) -> None:
        assert request.tables is not None
        self.cache.free(request.tables)
        self.running.remove(request)
        heapq.heappush(self._free_slots, request.slot)
