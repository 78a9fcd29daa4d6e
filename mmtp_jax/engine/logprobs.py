"""Log-probabilities of emitted tokens and of prompts: computed in the step, taken on the host."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from mmtp_jax.engine.delta import TokenLogprobs
from mmtp_jax.engine.plan import LogprobOutput, PromptLogprobs
from mmtp_jax.models.model import Model
from mmtp_jax.sampling.sampler import logprobs

# Rows of a prompt whose logits are held at once, or as many as the step samples from anyway: the
# programs of decode steps then have no loop, which on a GPU would keep them out of a CUDA graph.
PROMPT_BLOCK = 64

Values = tuple[Array, Array, Array]


def _if_wanted(wanted: Bool[Array, ""], compute: Callable[[], Values]) -> Values:
    """What `compute` gives, or zeros of the same shapes at no cost."""

    def skip() -> Values:
        shapes = jax.eval_shape(compute)
        zeros: Values = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return zeros

    values: Values = jax.lax.cond(wanted, compute, skip)
    return values


def emitted_logprobs(
    logits: Float[Array, "S V"],
    draws: Int32[Array, " S"],
    wanted: Array,
    rows: Int32[Array, "B W"],
) -> LogprobOutput:
    """Those of the tokens in `rows`; zeros unless `wanted`."""
    chosen, top_ids, top_values = _if_wanted(wanted, lambda: logprobs(logits, draws))
    return LogprobOutput(chosen[rows], top_ids[rows], top_values[rows])


def prompt_logprobs(
    model: Model,
    normed: Float[Array, "T H"],
    following: Int32[Array, " T"],
    wanted: Bool[Array, ""],
    logit_rows: int,
    first_row: Int32[Array, " B"],
    first_position: Int32[Array, " B"],
) -> PromptLogprobs:
    """Those of the token after every row; zeros unless `wanted`.

    Rows go in blocks, so that no more logits exist at once than in the rest of the step, which
    samples from `logit_rows` rows.
    """
    num_rows = following.shape[0]
    block = min(num_rows, max(PROMPT_BLOCK, logit_rows))
    padding = -num_rows % block

    def of_block(rows: tuple[Array, Array]) -> Values:
        states, tokens = rows
        return logprobs(model.target.logits(states), tokens)

    def compute() -> Values:
        states = jnp.pad(normed, ((0, padding), (0, 0))).reshape(-1, block, normed.shape[1])
        tokens = jnp.pad(following, (0, padding)).reshape(-1, block)
        blocks = jax.lax.map(of_block, (states, tokens))
        values: Values = jax.tree.map(
            lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:num_rows], blocks
        )
        return values

    return PromptLogprobs(first_row, first_position, *_if_wanted(wanted, compute))


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

    def take(self, output: PromptLogprobs, index: int, num_rows: int) -> None:
        """Add request `index`'s rows of a step (host arrays)."""
        row, position = int(output.first_row[index]), int(output.first_position[index])
        for offset in range(min(num_rows, self._size - 1 - position)):
            self._found[position + offset + 1] = TokenLogprobs(
                float(output.chosen[row + offset]),
                tuple(output.top_ids[row + offset, : self._num_top].tolist()),
                tuple(output.top_values[row + offset, : self._num_top].tolist()),
            )

    def result(self) -> tuple[TokenLogprobs, ...]:
        """Those of every prompt token but the first."""
        return tuple(self._found[position] for position in range(1, self._size))
