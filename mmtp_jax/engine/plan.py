"""What one step is told and what it answers: a few small arrays each way.

Fields of the plan are NumPy arrays on the host and traced in the step (`Any`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepPlan:
    """B requests (slot = R for padding). `rows` is an upper bound on the target rows: the device
    clips it to the tokens and drafts it holds, the request's limit and `capacity` (positions
    that have pages in every group). `entries` are new page-table entries: group, slot, column,
    page (slot = R: none). `logprobs` says whether any request of the step wants them.
    """

    slot: Int32[Any, " B"]
    rows: Int32[Any, " B"]
    capacity: Int32[Any, " B"]
    entries: Int32[Any, "X 4"]
    logprobs: Bool[Any, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogprobOutput:
    """Log-softmax of the raw logits at every emitted position; zeros when no request asked."""

    chosen: Float[Array, "B W"]
    top_ids: Int32[Array, "B W 20"]
    top_values: Float[Array, "B W 20"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptLogprobs:
    """Log-softmax of the raw logits at the rows of a step, for the known token after each."""

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutput:
    """Per request: `tokens[b, :count[b]]` were emitted (accepted drafts, then the bonus token),
    `drafted` drafts were verified, `done` says the request ended on the device (stop id or limit),
    `drafts` propose the tokens after the newest one. Its target rows are those from `first_row` on,
    at the positions from `first_position` on."""

    tokens: Int32[Array, "B W"]
    count: Int32[Array, " B"]
    drafted: Int32[Array, " B"]
    done: Bool[Array, " B"]
    drafts: Int32[Array, "B N"]
    logprobs: LogprobOutput
    first_row: Int32[Array, " B"]
    first_position: Int32[Array, " B"]
    collected: CollectedLogits | None
