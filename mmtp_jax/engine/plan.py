"""What one step is told and what it answers: one small array each way, because each array of a call
costs the host time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from mmtp_jax.engine.buckets import Bucket
from mmtp_jax.engine.request import ScheduledRequest


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepPlan:
    """B requests: slot (R for padding), rows, drafts, capacity. `rows` is an upper bound on the
    target rows: the device clips it to the tokens and drafts it holds, the request's limit and
    `capacity` (positions that have pages in every group). `drafts` are to be proposed for the next
    step: so many modules run. `entries` are new page-table entries: group, slot, column, page
    (slot = R: none). All of it lies in `packed`, part after part: a NumPy array, the same on the
    device, or traced in the step (`Any`).
    """

    packed: Int32[Any, " 4*B+4*X"]
    num_requests: int = dataclasses.field(metadata={"static": True})

    @property
    def slot(self) -> Int32[Any, " B"]:
        return self.packed[: self.num_requests]

    @property
    def rows(self) -> Int32[Any, " B"]:
        return self.packed[self.num_requests : 2 * self.num_requests]

    @property
    def drafts(self) -> Int32[Any, " B"]:
        return self.packed[2 * self.num_requests : 3 * self.num_requests]

    @property
    def capacity(self) -> Int32[Any, " B"]:
        return self.packed[3 * self.num_requests : 4 * self.num_requests]

    @property
    def entries(self) -> Int32[Any, "X 4"]:
        return self.packed[4 * self.num_requests :].reshape(-1, 4)

    @classmethod
    def pack(
        cls, bucket: Bucket, num_slots: int, scheduled: Sequence[ScheduledRequest] = ()
    ) -> StepPlan:
        """The plan of what was scheduled, padded to the sizes of the bucket's program; ValueError
        if it is more than that."""
        size = 4 * bucket.num_requests + 4 * bucket.num_entries
        plan = cls(np.zeros(size, np.int32), bucket.num_requests)
        plan.slot[:] = num_slots
        plan.slot[: len(scheduled)] = [row.slot for row in scheduled]
        plan.rows[: len(scheduled)] = [row.num_rows for row in scheduled]
        plan.drafts[: len(scheduled)] = [row.num_drafts for row in scheduled]
        plan.capacity[: len(scheduled)] = [row.capacity for row in scheduled]
        plan.entries[:] = num_slots
        entries = [
            (group, row.slot, column, page)
            for row in scheduled
            if row.entries
            for group, new in enumerate(row.entries)
            for column, page in new
        ]
        if entries:
            plan.entries[: len(entries)] = entries
        return plan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowLogprobs:
    """Log-softmax of the raw logits at the rows of a step, for the token after each: the known one,
    or the one that was drawn from the row."""

    chosen: Float[Array, " T"]
    top_ids: Int32[Array, "T 20"]
    top_values: Float[Array, "T 20"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CollectedLogits:
    """Every row's logits (scoring only): target rows, and the rows of every module."""

    target_position: Int32[Array, " T"]
    target_logits: Float[Array, "T V"]
    target_real: Bool[Array, " T"]
    mtp_position: Int32[Array, " T"]
    mtp_logits: Float[Array, "N T V"]
    mtp_real: Bool[Array, " T"]
    mtp_request: Int32[Array, " T"]
    target_request: Int32[Array, " T"]


class HostOutput(NamedTuple):
    """What a step did for each request, on the host: request b emitted `tokens[b][: emitted[b]]`
    (accepted drafts, then the bonus token) after verifying `drafted[b]` drafts; `done[b]` says that
    it ended on the device (stop id or limit). `drafts[b]` propose the tokens after the newest one.
    Its target rows are those from `first_row[b]` on, at the positions from `first_position[b]` on.
    """

    emitted: list[int]
    drafted: list[int]
    done: list[int]
    first_row: list[int]
    first_position: list[int]
    tokens: list[list[int]]
    drafts: Int32[np.ndarray, "B W-1"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutput:
    """`packed`: the fields of `HostOutput` side by side; one array, so that one transfer brings all
    that the host reads."""

    packed: Int32[Array, "B 3+2W+2"]
    collected: CollectedLogits | None

    @classmethod
    def pack(
        cls,
        *,
        count: Int32[Array, " B"],
        drafted: Int32[Array, " B"],
        done: Bool[Array, " B"],
        first_row: Int32[Array, " B"],
        first_position: Int32[Array, " B"],
        tokens: Int32[Array, "B W"],
        drafts: Int32[Array, "B W-1"],
        collected: CollectedLogits | None,
    ) -> StepOutput:
        """`tokens[b, :count[b]]` were emitted."""
        numbers = jnp.stack([count, drafted, done, first_row, first_position], axis=1)
        packed = jnp.concatenate([numbers, tokens, drafts], axis=1, dtype=jnp.int32)
        return cls(packed, collected)

    def unpack(self, num_requests: int) -> HostOutput:
        """The first requests' parts, once they have arrived."""
        packed = np.asarray(self.packed)[:num_requests]
        width = packed.shape[1] // 2 - 2  # 5 numbers, W tokens, W - 1 drafts
        numbers, tokens, drafts = np.split(packed, (5, 5 + width), axis=1)
        emitted, drafted, done, first_row, first_position = numbers.T.tolist()
        return HostOutput(
            emitted, drafted, done, first_row, first_position, tokens.tolist(), drafts
        )
