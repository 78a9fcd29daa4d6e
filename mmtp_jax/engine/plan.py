"""What one step is told and what it answers: a small array or two each way, because each array of a
call costs the host time.
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
from mmtp_jax.engine.scheduler import ScheduledRequest


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepPlan:
    """B requests: slot (R for padding), rows, capacity. `rows` is an upper bound on the target
    rows: the device clips it to the tokens and drafts it holds, the request's limit and `capacity`
    (positions that have pages in every group). `entries` are new page-table entries: group, slot,
    column, page (slot = R: none). NumPy arrays on the host, traced in the step (`Any`).
    """

    requests: Int32[Any, "B 3"]
    entries: Int32[Any, "X 4"]

    @property
    def slot(self) -> Int32[Any, " B"]:
        return self.requests[:, 0]

    @property
    def rows(self) -> Int32[Any, " B"]:
        return self.requests[:, 1]

    @property
    def capacity(self) -> Int32[Any, " B"]:
        return self.requests[:, 2]

    @classmethod
    def pack(
        cls, bucket: Bucket, num_slots: int, scheduled: Sequence[ScheduledRequest] = ()
    ) -> StepPlan:
        """The plan of what was scheduled, padded to the sizes of the bucket's program."""
        requests = [(row.slot, row.num_rows, row.capacity) for row in scheduled]
        entries = [
            (group, row.slot, column, page)
            for row in scheduled
            if row.entries
            for group, new in enumerate(row.entries)
            for column, page in new
        ]
        requests += [(num_slots, 0, 0)] * (bucket.num_requests - len(requests))
        padded = np.full((bucket.num_entries, 4), num_slots, np.int32)
        if entries:
            padded[: len(entries)] = entries
        return cls(np.array(requests, np.int32), padded)


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


class RequestOutput(NamedTuple):
    """What a step did for one request, on the host: it emitted `tokens` (accepted drafts, then the
    bonus token) after verifying `drafted` drafts; `done` says that the request ended on the device
    (stop id or limit). `drafts` propose the tokens after the newest one. Its target rows are those
    from `first_row` on, at the positions from `first_position` on."""

    tokens: list[int]
    drafted: int
    done: int
    first_row: int
    first_position: int
    drafts: list[int]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutput:
    """`packed`: the fields of every request's `RequestOutput` side by side, tokens and drafts last;
    one array, so that one transfer brings all that the host reads."""

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

    def unpack(self, num_requests: int) -> list[RequestOutput]:
        """The first requests' parts, once they have arrived."""
        packed = np.asarray(self.packed)[:num_requests].tolist()
        width = self.packed.shape[1] // 2 - 2  # 5 numbers, W tokens, W - 1 drafts
        return [
            RequestOutput(values[:count], drafted, done, row, position, values[width:])
            for count, drafted, done, row, position, *values in packed
        ]
