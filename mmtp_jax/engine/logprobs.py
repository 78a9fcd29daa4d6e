"""Log-probabilities of emitted tokens (in the step) and of prompts (after it), and what the host
takes of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from mmtp_jax.engine.delta import TokenLogprobs
from mmtp_jax.engine.plan import LogprobOutput, PromptLogprobs
from mmtp_jax.engine.state import EngineState
from mmtp_jax.models.model import ModelGraph, Params
from mmtp_jax.sampling.params import MAX_LOGPROBS
from mmtp_jax.sampling.sampler import logprobs

# Rows of a prompt whose logits are held at once.
PROMPT_BLOCK = 64

Values = tuple[Array, Array, Array]


def emitted_logprobs(
    logits: Float[Array, "S V"],
    draws: Int32[Array, " S"],
    wanted: Array,
    rows: Int32[Array, "B W"],
) -> LogprobOutput:
    """Those of the tokens in `rows`; zeros unless `wanted`."""

    def compute() -> Values:
        return logprobs(logits, draws)

    def skip() -> Values:
        shapes = jax.eval_shape(compute)
        zeros: Values = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return zeros

    chosen, top_ids, top_values = jax.lax.cond(wanted, compute, skip)
    return LogprobOutput(chosen[rows], top_ids[rows], top_values[rows])


def prompt_logprobs(
    graph: ModelGraph, params: Params, state: EngineState, num_rows: Int32[Any, ""]
) -> PromptLogprobs:
    """Those of the tokens after the first `num_rows` rows of the latest step; the rest is zeros.

    A program of its own, so that steps nobody asked it of have no part in it. Rows go in blocks, so
    that a long prompt's logits never exist at once.
    """
    model = graph.bind(params)
    size = state.row_targets.shape[0]
    block = min(size, PROMPT_BLOCK)
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
    return PromptLogprobs(*jax.lax.fori_loop(0, num_blocks, of_block, empty))


def taken_logprobs(
    output: LogprobOutput, index: int, num_tokens: int, num_top: int
) -> tuple[TokenLogprobs, ...]:
    """Those of the tokens that request `index` emitted in a step (host arrays)."""
    return tuple(
        TokenLogprobs(
            float(output.chosen[index, column]),
            tuple(output.top_ids[index, column, :num_top].tolist()),
            tuple(output.top_values[index, column, :num_top].tolist()),
        )
        for column in range(num_tokens)
    )


class PromptCollector:
    """Takes the log-probabilities of one request's prompt from the steps that compute it."""

    def __init__(self, num_prompt_tokens: int, num_top: int) -> None:
        self._size = num_prompt_tokens
        self._num_top = num_top
        self._found: dict[int, TokenLogprobs] = {}

    def take(self, found: PromptLogprobs, row: int, position: int, num_rows: int) -> None:
        """Add the request's rows of a step (host arrays): those from `row` on, at the positions
        from `position` on."""
        for offset in range(min(num_rows, self._size - 1 - position)):
            self._found[position + offset + 1] = TokenLogprobs(
                float(found.chosen[row + offset]),
                tuple(found.top_ids[row + offset, : self._num_top].tolist()),
                tuple(found.top_values[row + offset, : self._num_top].tolist()),
            )

    def result(self) -> tuple[TokenLogprobs, ...]:
        """Those of every prompt token but the first."""
        return tuple(self._found[position] for position in range(1, self._size))
