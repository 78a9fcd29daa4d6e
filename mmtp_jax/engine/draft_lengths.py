"""Draft lengths of an engine's requests, chosen by what its steps take and accept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmtp_jax.adaptive.controller import DraftController
from mmtp_jax.cache.manager import CacheManager
from mmtp_jax.engine.buckets import Bucket
from mmtp_jax.engine.request import Drafts, Request, ScheduledRequest
from mmtp_jax.engine.scheduled import ScheduledStep
from mmtp_jax.engine.scheduler import Scheduler

# A request that is restarted needs its pages again. Where so many are in use it might not get them.
MOST_USAGE = 0.8


class DraftLengths:
    """A scheduler's policy: of a request as many drafts are proposed as are verified.

    Modules that are left out come back within `behind` positions, else by a restart with all of
    them.
    """

    def __init__(self, controller: DraftController, num_drafts: int, behind: int) -> None:
        self._controller = controller
        self._num_drafts = num_drafts
        self._behind = behind
        self._drafts = [Drafts(count, count) for count in range(num_drafts + 1)]

    def __call__(self, request: Request) -> Drafts:
        return self._drafts[self._controller.drafts(request.slot)]

    def depth(self, request: Request) -> int:
        """The modules that run in a prefill, or more if all do."""
        return self._num_drafts if request.wants_all else self._controller.prefill_depth

    def decide(self, scheduler: Scheduler) -> None:
        """Settle the lengths of the next step, and restart requests where that pays."""
        decoding = [request for request in scheduler.running if not request.prefilling]
        slots = [request.slot for request in decoding]
        modules = [request.most_modules(self._behind) for request in decoding]
        # Fewer modules than there are have a draft each.
        all_modules = scheduler.cache.num_modules
        most = [self._num_drafts if count >= all_modules else count for count in modules]
        restartable = scheduler.cache.usage <= MOST_USAGE
        rows = [
            _restart_rows(request, scheduler.cache)
            if restartable and count < self._num_drafts
            else -1
            for request, count in zip(decoding, most, strict=True)
        ]
        self._controller.decide(*(np.array(each, np.int64) for each in (slots, most, rows)))
        restarts = self._controller.restarts()
        if restarts:
            running = {request.slot: request for request in decoding}
            for slot in restarts:
                running[slot].wants_all = True
                scheduler.restart(running[slot])

    def dispatched(self, step: ScheduledStep) -> None:
        """The step is about to run."""
        for scheduled in step.admissions:
            self._controller.admitted(scheduled.slot)

    def verified(self, rows: Sequence[tuple[int, int, int]]) -> None:
        """What a step verified: slot, drafts and how many of them were accepted, of every request
        that emitted."""
        if rows:
            slots, drafted, accepted = np.array(rows, np.int64).T
            self._controller.observed(slots, drafted, accepted)

    def took(
        self, bucket: Bucket, requests: Sequence[ScheduledRequest], seconds: float, waited: bool
    ) -> None:
        """A step took so long, and the host `waited` for the device or not."""
        chunk_rows = sum(row.num_rows for row in requests if row.prefills)
        self._controller.took(bucket.program, seconds, chunk_rows, waited)


def _restart_rows(request: Request, cache: CacheManager) -> int:
    """Rows that a restart prefills, if what all modules hold is found again."""
    reuses = request.reuses_prefix and cache.enable_prefix_caching
    held = request.exact if reuses and request.depth >= cache.num_modules else 0
    return request.max_computed - held
