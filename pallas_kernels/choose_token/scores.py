"""The processed scores of a row, in scratch memory: mask, bias, penalties, temperature, stop ids.

Scratch memory has an int32 for every token: first counts of the history, for rows with penalties,
then the bits of the score.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels._compat import accumulate, barrier, load, store
from pallas_kernels.choose_token.row import STOP_IDS, Options

LOWEST = -jnp.inf
_IN_PROMPT = -(2**31)
_HISTORY_BLOCK = 256


def logits_of(logits_ref: Any, row: Array, number: Array, block: int) -> tuple[Array, Array]:
    """Ids and logits of a block of tokens; -inf past the vocabulary."""
    ids = number * block + jnp.arange(block)
    return ids, load(logits_ref.at[row, ids], mask=ids < logits_ref.shape[1], other=LOWEST)


def scores_of(scratch_ref: Any, row: Array, number: Array, block: int) -> tuple[Array, Array]:
    """Ids and processed scores of a block of tokens; -inf past the vocabulary."""
    ids = number * block + jnp.arange(block)
    exist = ids < scratch_ref.shape[1]
    bits = load(scratch_ref.at[row, ids], mask=exist, other=0)
    return ids, jnp.where(exist, lax.bitcast_convert_type(bits, jnp.float32), LOWEST)


def count_history(
    scratch_ref: Any, history_ref: Any, row: Array, options: Options, block: int
) -> None:
    """Scratch: how often the output before the row's index has each token, with the highest bit if
    the prompt has it."""
    vocab_size = scratch_ref.shape[1]
    start, end = options.prompt_len, jnp.minimum(options.index, history_ref.shape[1])

    def clear(number: Array, _: None) -> None:
        ids = number * block + jnp.arange(block)
        store(scratch_ref.at[row, ids], jnp.zeros(block, jnp.int32), mask=ids < vocab_size)

    def tokens(number: Array) -> tuple[Array, Array, Array]:
        position = number * _HISTORY_BLOCK + jnp.arange(_HISTORY_BLOCK)
        past = position < end
        token = load(history_ref.at[options.slot, position], mask=past, other=vocab_size)
        return position, token, past & (token >= 0) & (token < vocab_size)

    def mark(number: Array, _: None) -> None:
        position, token, counts = tokens(number)
        counts &= position < start
        where = scratch_ref.at[row, jnp.where(counts, token, vocab_size)]
        store(where, jnp.full(_HISTORY_BLOCK, _IN_PROMPT, jnp.int32), mask=counts)

    def add(number: Array, _: None) -> None:
        position, token, counts = tokens(number)
        counts &= position >= start
        accumulate(scratch_ref, (row, jnp.where(counts, token, 0)), counts.astype(jnp.int32))

    blocks = pl.cdiv(end, _HISTORY_BLOCK)
    lax.fori_loop(0, pl.cdiv(vocab_size, block), clear, None)
    barrier()
    lax.fori_loop(0, jnp.minimum(blocks, pl.cdiv(start, _HISTORY_BLOCK)), mark, None)
    barrier()
    lax.fori_loop(start // _HISTORY_BLOCK, blocks, add, None)
    barrier()


def write_scores(
    scratch_ref: Any,
    logits_ref: Any,
    rows_ref: Any,
    bias_ref: Any,
    masks_ref: Any,
    row: Array,
    options: Options,
    block: int,
) -> None:
    """Scratch: from counts to scores."""
    slot, vocab_size = options.slot, scratch_ref.shape[1]
    has_bias, has_penalties, divisor = options.has_bias != 0, options.has_penalties, options.divisor

    def write(number: Array, _: None) -> None:
        ids, logits = logits_of(logits_ref, row, number, block)
        exist = ids < vocab_size
        word = masks_ref.at[slot, options.mask, ids // 32]
        words = load(word, mask=exist & options.is_masked, other=-1)
        scores = jnp.where((words >> (ids % 32)) & 1 == 1, logits, LOWEST)
        scores += load(bias_ref.at[slot, ids], mask=exist & has_bias, other=0.0)
        seen = load(scratch_ref.at[row, ids], mask=exist & has_penalties, other=0)
        counts = (seen & ~_IN_PROMPT).astype(jnp.float32)
        repeated = jnp.where(scores > 0, scores / options.repetition, scores * options.repetition)
        scores = jnp.where(seen != 0, repeated, scores)
        scores = scores - options.frequency * counts
        scores = scores - jnp.where(counts > 0, options.presence, 0.0)
        bits = lax.bitcast_convert_type(scores / divisor, jnp.int32)
        store(scratch_ref.at[row, ids], bits, mask=exist)

    lax.fori_loop(0, pl.cdiv(vocab_size, block), write, None)
    barrier()

    # The minimum length comes before the penalties, but none of them changes -inf.
    @pl.when(options.is_short)
    def ban_stop_ids() -> None:
        num_ids = rows_ref.shape[1] - STOP_IDS
        place = jnp.arange(pl.next_power_of_2(num_ids))
        ids = load(rows_ref.at[slot, STOP_IDS + place], mask=place < num_ids, other=-1)
        banned = (ids >= 0) & (ids < vocab_size)
        where = scratch_ref.at[row, jnp.where(banned, ids, vocab_size)]
        lowest = jnp.full(place.shape, LOWEST, jnp.float32)
        store(where, lax.bitcast_convert_type(lowest, jnp.int32), mask=banned)
        barrier()
