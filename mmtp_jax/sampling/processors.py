"""Logits processing: bias and bans, minimum length, penalties, temperature, in vLLM's order.

Everything a row needs follows from its slot's parameters and the history before its index, drafts
included; nothing is counted from step to step. Each option runs under its own `lax.cond`, so a step
none of whose rows uses it pays nothing, and is exactly neutral for rows that do not use it.
Dims: S rows of a step, R slots, V vocabulary, L longest history.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float32, Int32

from mmtp_jax.sampling.state import RowParams, SamplingState, mask_column, params_of


def process(
    logits: Float32[Array, "S V"],
    state: SamplingState,
    slot: Int32[Array, " S"],
    index: Int32[Array, " S"],
    history: Int32[Array, "R L"],
) -> Float32[Array, "S V"]:
    """Apply the options of each row's request to its logits, and divide by its temperature.

    Row s chooses the token at absolute index `index[s]` of the sequence in slot `slot[s]`, whose
    prompt, output and drafts before it are `history[slot[s], :index[s]]`. Rows whose slot is
    R or more are padding and come back unchanged. Greedy rows are divided by 1.
    """
    params = params_of(state, slot)
    rows = jnp.arange(logits.shape[0])[:, None]

    def count(start: Int32[Array, " S"]) -> Int32[Array, "S V"]:
        """How often each token occurs in history[start:index] of each row."""
        position = jnp.arange(history.shape[1])
        counted = (position >= start[:, None]) & (position < index[:, None])
        tokens = history.at[slot].get(mode="clip")
        return jnp.zeros(logits.shape, jnp.int32).at[rows, tokens].add(counted, mode="drop")

    column = mask_column(state, slot, index)

    def mask(logits: Float32[Array, "S V"]) -> Float32[Array, "S V"]:
        words = state.masks.at[slot, column].get(mode="clip")
        bits = (words[:, :, None] >> jnp.arange(32)) & 1
        allowed = bits.reshape(logits.shape[0], -1)[:, : logits.shape[1]] == 1
        return jnp.where((column < 0)[:, None] | allowed, logits, -jnp.inf)

    def add_bias(logits: Float32[Array, "S V"]) -> Float32[Array, "S V"]:
        bias = state.bias.at[slot].get(mode="clip")
        return jnp.where(params.has_bias[:, None], logits + bias, logits)

    below_min = index < params.min_len

    def ban_stop_ids(logits: Float32[Array, "S V"]) -> Float32[Array, "S V"]:
        vocab_size = logits.shape[1]
        banned = below_min[:, None] & (params.stop_ids >= 0)
        stop_ids = jnp.where(banned, params.stop_ids, vocab_size)
        return logits.at[rows, stop_ids].set(-jnp.inf, mode="drop")

    def repetition(logits: Float32[Array, "S V"]) -> Float32[Array, "S V"]:
        penalty = params.repetition[:, None]
        penalised = jnp.where(logits > 0, logits / penalty, logits * penalty)
        return jnp.where(count(jnp.zeros_like(index)) > 0, penalised, logits)

    def presence_and_frequency(logits: Float32[Array, "S V"]) -> Float32[Array, "S V"]:
        counts = count(params.prompt_len)
        logits = logits - params.frequency[:, None] * counts
        return logits - params.presence[:, None] * (counts > 0)

    def divide(logits: Float32[Array, "S V"]) -> Float32[Array, "S V"]:
        return logits / jnp.where(params.temperature > 0, params.temperature, 1.0)[:, None]

    logits = apply_if(column >= 0, mask, logits)
    logits = apply_if(params.has_bias, add_bias, logits)
    logits = apply_if(below_min, ban_stop_ids, logits)
    logits = apply_if(params.repetition != 1, repetition, logits)
    logits = apply_if(
        (params.frequency != 0) | (params.presence != 0), presence_and_frequency, logits
    )
    return apply_if(params.temperature > 0, divide, logits)


def changes_logits(
    params: RowParams, column: Int32[Array, " S"], index: Int32[Array, " S"]
) -> Bool[Array, " S"]:
    """The rows for which `process` or the sampler does anything at all; `column` as from
    `mask_column`."""
    return (
        params.has_bias
        | (column >= 0)
        | (index < params.min_len)
        | (params.repetition != 1)
        | (params.frequency != 0)
        | (params.presence != 0)
        | (params.temperature > 0)
    )


def apply_if(
    wanted: Bool[Array, " S"],
    transform: Callable[[Float32[Array, "S V"]], Float32[Array, "S V"]],
    logits: Float32[Array, "S V"],
) -> Float32[Array, "S V"]:
    """`transform(logits)` if any row wants it, decided on the device."""
    result: Array = lax.cond(jnp.any(wanted), transform, lambda unchanged: unchanged, logits)
    return result
