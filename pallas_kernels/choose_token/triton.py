"""Triton-lowered Pallas kernel: one program per row, which branches on the row's own options.

A greedy row without options reads its logits once, a row with no more than a temperature adds noise
on the way. Any other row writes its processed scores to scratch memory, finds the limit of its
filters there, and then chooses. The same memory counts the tokens of the history before that, for
rows with penalties.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float32, Int32

from pallas_kernels._compat import accumulate, barrier, compiler_params, interpreted, load, store
from pallas_kernels.choose_token.filters import Limit, Row, filter_limit, ordered_bits
from pallas_kernels.choose_token.noise import gumbel_noise, token_key
from pallas_kernels.choose_token.row import FLOATS, INTS, STOP_IDS


@dataclass(frozen=True)
class Config:
    """Tokens read at a time, tokens given noise at a time, and how the kernel is compiled."""

    block: int = 4096
    noise_block: int = 1024
    num_warps: int = 8


_IN_PROMPT = -(2**31)
_HISTORY_BLOCK = 256
_LOWEST = -jnp.inf


def _kernel(
    logits_ref: Any,
    slot_ref: Any,
    index_ref: Any,
    rows_ref: Any,
    bias_ref: Any,
    masks_ref: Any,
    mask_start_ref: Any,
    history_ref: Any,
    tokens_ref: Any,
    scratch_ref: Any,
    *,
    config: Config,
) -> None:
    vocab_size, (num_slots, width) = logits_ref.shape[1], masks_ref.shape[:2]
    row = pl.program_id(0)
    index = index_ref[row]
    is_slot = (slot_ref[row] >= 0) & (slot_ref[row] < num_slots)
    slot = jnp.where(is_slot, slot_ref[row], 0)

    def integer(name: str) -> Array:
        return rows_ref[slot, len(FLOATS) + INTS.index(name)]

    def real(name: str) -> Array:
        return lax.bitcast_convert_type(rows_ref[slot, FLOATS.index(name)], jnp.float32)

    temperature, repetition = real("temperature"), real("repetition")
    presence, frequency = real("presence"), real("frequency")
    column = index - mask_start_ref[slot]
    is_masked = (mask_start_ref[slot] >= 0) & (column >= 0) & (column < width)
    has_bias, is_short = integer("has_bias") != 0, index < integer("min_len")
    has_penalties = (repetition != 1) | (presence != 0) | (frequency != 0)
    is_sampled = is_slot & (temperature > 0)
    min_p, top_k, top_p = real("min_p"), integer("top_k"), real("top_p")
    is_filtered = is_sampled & ((min_p > 0) | (top_k > 0) | (top_p < 1))
    is_edited = is_slot & (is_masked | has_bias | is_short | has_penalties)
    in_scratch = is_edited | is_filtered
    divisor = jnp.where(is_sampled, temperature, 1.0)

    def ids_of(number: Array, block: int) -> tuple[Array, Array]:
        ids = number * block + jnp.arange(block)
        return ids, ids < vocab_size

    def logits_of(number: Array, block: int) -> tuple[Array, Array]:
        ids, exist = ids_of(number, block)
        return ids, load(logits_ref.at[row, ids], mask=exist, other=_LOWEST)

    def tempered(number: Array, block: int) -> tuple[Array, Array]:
        ids, logits = logits_of(number, block)
        return ids, logits / divisor

    def scores_of(number: Array, block: int) -> tuple[Array, Array]:
        ids, exist = ids_of(number, block)
        bits = load(scratch_ref.at[row, ids], mask=exist, other=0)
        scores = lax.bitcast_convert_type(bits, jnp.float32)
        return ids, jnp.where(exist, scores, _LOWEST)

    def choose(
        block: int,
        read: Callable[[Array, int], tuple[Array, Array]],
        limit: Limit | None = None,
        noisy: bool = False,
    ) -> None:
        """The best of what `limit` keeps, with noise; NaN is never better."""
        key = token_key(lax.bitcast_convert_type(integer("seed"), jnp.uint32), index)

        def compare(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            best, best_ids = carry
            ids, scores = read(number, block)
            if limit is not None:
                scores = jnp.where(limit.keeps(ordered_bits(scores), ids), scores, _LOWEST)
            if noisy:
                scores = scores + gumbel_noise(key, ids, vocab_size)
            better = scores > best
            return jnp.where(better, scores, best), jnp.where(better, ids, best_ids)

        start = (jnp.full(block, _LOWEST, jnp.float32), jnp.zeros(block, jnp.int32))
        best, ids = lax.fori_loop(0, pl.cdiv(vocab_size, block), compare, start)
        tokens_ref[row] = jnp.min(jnp.where(best == jnp.max(best), ids, vocab_size))

    def count_history() -> None:
        """Scratch: how often the output has each token, with the highest bit if the prompt has
        it."""
        start, end = integer("prompt_len"), jnp.minimum(index, history_ref.shape[1])

        def clear(number: Array, _: None) -> None:
            ids, exist = ids_of(number, config.block)
            store(scratch_ref.at[row, ids], jnp.zeros(config.block, jnp.int32), mask=exist)

        def tokens(number: Array) -> tuple[Array, Array, Array]:
            position = number * _HISTORY_BLOCK + jnp.arange(_HISTORY_BLOCK)
            past = position < end
            token = load(history_ref.at[slot, position], mask=past, other=vocab_size)
            return position, token, past & (token >= 0) & (token < vocab_size)

        def mark(number: Array, _: None) -> None:
            position, token, counts = tokens(number)
            counts &= position < start
            where = scratch_ref.at[row, jnp.where(counts, token, vocab_size)]
            store(where, jnp.full(_HISTORY_BLOCK, _IN_PROMPT, jnp.int32), mask=counts)

        def add(number: Array, _: None) -> None:
            position, token, counts = tokens(number)
            counts &= position >= start
            where = (row, jnp.where(counts, token, 0))
            accumulate(scratch_ref, where, counts.astype(jnp.int32))

        blocks = pl.cdiv(end, _HISTORY_BLOCK)
        lax.fori_loop(0, pl.cdiv(vocab_size, config.block), clear, None)
        barrier()
        lax.fori_loop(0, jnp.minimum(blocks, pl.cdiv(start, _HISTORY_BLOCK)), mark, None)
        barrier()
        lax.fori_loop(start // _HISTORY_BLOCK, blocks, add, None)
        barrier()

    def write_scores() -> None:
        def write(number: Array, _: None) -> None:
            ids, logits = logits_of(number, config.block)
            exist = ids < vocab_size
            word = masks_ref.at[slot, jnp.where(is_masked, column, 0), ids // 32]
            words = load(word, mask=exist & is_masked, other=-1)
            scores = jnp.where((words >> (ids % 32)) & 1 == 1, logits, _LOWEST)
            scores += load(bias_ref.at[slot, ids], mask=exist & has_bias, other=0.0)
            seen = load(scratch_ref.at[row, ids], mask=exist & has_penalties, other=0)
            counts = (seen & ~_IN_PROMPT).astype(jnp.float32)
            penalised = jnp.where(scores > 0, scores / repetition, scores * repetition)
            scores = jnp.where(seen != 0, penalised, scores)
            scores = scores - frequency * counts
            scores = scores - jnp.where(counts > 0, presence, 0.0)
            bits = lax.bitcast_convert_type(scores / divisor, jnp.int32)
            store(scratch_ref.at[row, ids], bits, mask=exist)

        lax.fori_loop(0, pl.cdiv(vocab_size, config.block), write, None)
        barrier()

        @pl.when(is_short)
        def ban_stop_ids() -> None:
            place = jnp.arange(pl.next_power_of_2(rows_ref.shape[1] - STOP_IDS))
            exist = place < rows_ref.shape[1] - STOP_IDS
            ids = load(rows_ref.at[slot, STOP_IDS + place], mask=exist, other=-1)
            banned = (ids >= 0) & (ids < vocab_size)
            where = scratch_ref.at[row, jnp.where(banned, ids, vocab_size)]
            lowest = jnp.full(place.shape, _LOWEST, jnp.float32)
            store(where, lax.bitcast_convert_type(lowest, jnp.int32), mask=banned)
            barrier()

    @pl.when(~in_scratch & ~is_sampled)
    def greedy() -> None:
        choose(config.block, logits_of)

    @pl.when(~in_scratch & is_sampled)
    def sampled() -> None:
        choose(config.noise_block, tempered, noisy=True)

    @pl.when(in_scratch)
    def with_options() -> None:
        pl.when(has_penalties)(count_history)
        write_scores()

        @pl.when(~is_sampled)
        def greedy() -> None:
            choose(config.block, scores_of)

        @pl.when(is_sampled)
        def sampled() -> None:
            scores = Row(lambda number: scores_of(number, config.block), config.block, vocab_size)
            limit = filter_limit(scores, min_p, top_k, top_p)
            choose(config.noise_block, scores_of, limit, noisy=True)


def choose_token(
    logits: Float32[Array, "S V"],
    slot: Int32[Array, " S"],
    index: Int32[Array, " S"],
    rows: Int32[Array, "R C"],
    bias: Float32[Array, "R V"],
    masks: Int32[Array, "R W words"],
    mask_start: Int32[Array, " R"],
    history: Int32[Array, "R L"],
    config: Config | None = None,
) -> Int32[Array, " S"]:
    """Choose the token at `index` of each row's sequence: the options in the packed row of its slot
    (columns as in `row`), its bias and mask, penalties of history[slot, :index], temperature, the
    filters, and Gumbel noise of (seed, index).

    Bit w of `masks[slot, c]`, the lowest bit of a word first, says whether token w may be chosen at
    index `mask_start[slot] + c` (-1: any). Rows whose slot is R or more are greedy without options.
    Ties go to the lowest id; NaN is never chosen over a number, and rows of NaN give token 0.
    Interpreted on a CPU.
    """
    config = Config() if config is None else config
    num_rows, vocab_size = logits.shape
    tokens, _ = pl.pallas_call(
        functools.partial(_kernel, config=config),
        out_shape=(
            jax.ShapeDtypeStruct((num_rows,), jnp.int32),
            jax.ShapeDtypeStruct((num_rows, vocab_size), jnp.int32),
        ),
        grid=(num_rows,),
        compiler_params=compiler_params(num_warps=config.num_warps, num_stages=2),
        interpret=interpreted(),
        name="choose_token",
    )(logits, slot, index, rows, bias, masks, mask_start, history)
    return tokens
