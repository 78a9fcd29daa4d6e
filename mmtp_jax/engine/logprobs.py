"""Log-probabilities of emitted tokens and of prompts, and what the host takes of them.

A program of their own computes them after the step, so that steps nobody asked it of have no part
in it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from mmtp_jax.engine.delta import TokenLogprobs
from mmtp_jax.engine.plan import RowLogprobs
from mmtp_jax.engine.state import EngineState
from mmtp_jax.models.model import ModelGraph, Params
from mmtp_jax.sampling.params import MAX_LOGPROBS
from mmtp_jax.sampling.sampler import logprobs

# Rows whose logits are held at once.
BLOCK = 64

Values = tuple[Array, Array, Array]


def row_logprobs(
    graph: ModelGraph, params: Params, state: EngineState, num_rows: Int32[Any, ""]
) -> RowLogprobs:
    """Those of the tokens after the first `num_rows` rows of the latest step; the rest is zeros.

    Rows go in blocks, so that a long prompt's logits never exist at once.
    """
    model = graph.bind(params)
    size = state.row_targets.shape[0]
    block = min(size, BLOCK)
    padding = -size % block
    states = jnp.pad(state.row_states, ((0, padding), (0, 0)))
    targets = jnp.pad(state.row_targets, (0, padding))

    def of_block(number: Int32[Array, ""], found: Values) -> Values:
        first = number * block
        part = logprobs(
            model.target.logits(jax.lax.dynamic_slice_in_dim(states, first, block)),
            jax.lax.dynamic_slice_in_dim(targets, first, block),
        )
        chosen, top_ids, top_values = (
            jax.lax.dynamic_update_slice_in_dim(whole, new, first, 0)
            for whole, new in zip(found, part, strict=True)
        )
        return chosen, top_ids, top_values

    empty = (
        jnp.zeros(size + padding, jnp.float32),
        jnp.zeros((size + padding, MAX_LOGPROBS), jnp.int32),
        jnp.zeros((size + padding, MAX_LOGPROBS), jnp.float32),
    )
    num_blocks = (num_rows + block - 1) // block
    return RowLogprobs(*jax.lax.fori_loop(0, num_blocks, of_block, empty))


def taken_logprobs(
    found: RowLogprobs, row: int, count: int, num_top: int
) -> tuple[TokenLogprobs, ...]:
    """Those of `count` rows from `row` on (host arrays)."""
    rows = slice(row, row + count)
    chosen, top_ids, top_values = (
        values.tolist()
        for values in (
            found.chosen[rows],
            found.top_ids[rows, :num_top],
            found.top_values[rows, :num_top],
        )
    )
    return tuple(
        TokenLogprobs(one, tuple(ids), tuple(values))
        for one, ids, values in zip(chosen, top_ids, top_values, strict=True)
    )


class PromptCollector:
    """Takes the log-probabilities of one request's prompt from the steps that compute it."""

    def __init__(self, num_prompt_tokens: int, num_top: int) -> None:
        self._size = num_prompt_tokens
        self._num_top = num_top
        self._found: dict[int, TokenLogprobs] = {}

    def take(self, found: RowLogprobs, row: int, position: int, num_rows: int) -> None:
        """Add the request's rows of a step (host arrays): those from `row` on, at the positions
        from `position` on."""
        count = min(num_rows, self._size - 1 - position)
        taken = taken_logprobs(found, row, max(count, 0), self._num_top)
        self._found.update(enumerate(taken, position + 1))

    def result(self) -> tuple[TokenLogprobs, ...]:
        """Those of every prompt token but the first."""
        return tuple(self._found[position] for position in range(1, self._size))
