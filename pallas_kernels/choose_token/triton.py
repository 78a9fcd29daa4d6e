"""Triton-lowered Pallas kernel: one program per row, which branches on the row's own options.

A greedy row without options reads its logits once, a row with no more than a temperature adds noise
on the way. Any other row writes its processed scores to scratch memory, finds the limit of its
filters there, and then chooses. The same memory counts the tokens of the history before that, for
rows with penalties. Filters mostly keep few tokens: those that they may keep are listed first, if
they are no more than a block.
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

from pallas_kernels._compat import barrier, compiler_params, interpreted, load, store
from pallas_kernels.choose_token.filters import Limit, Row, best_tokens, filter_limit, ordered_bits
from pallas_kernels.choose_token.noise import gumbel_noise, token_key
from pallas_kernels.choose_token.row import read_options
from pallas_kernels.choose_token.scores import (
    LOWEST,
    count_history,
    logits_of,
    scores_of,
    write_scores,
)

Read = Callable[[Array, int], tuple[Array, Array]]  # number and size of a block -> ids, scores


@dataclass(frozen=True)
class Config:
    """Tokens read at a time by a greedy row, by the options of others, and given noise, and how
    the kernel is compiled."""

    greedy_block: int = 8192
    block: int = 4096
    noise_block: int = 2048
    num_warps: int = 16


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
    listed_ref: Any,
    *,
    config: Config,
) -> None:
    vocab_size, row = logits_ref.shape[1], pl.program_id(0)
    options = read_options(
        rows_ref, mask_start_ref, slot_ref[row], index_ref[row], masks_ref.shape[1]
    )
    is_sampled, is_filtered, min_p = options.is_sampled, options.is_filtered, options.min_p
    in_scratch = options.is_edited | is_filtered
    logits = functools.partial(logits_of, logits_ref, row)
    scores = functools.partial(scores_of, scratch_ref, row)

    def tempered(number: Array, block: int) -> tuple[Array, Array]:
        ids, values = logits(number, block)
        return ids, values / options.divisor

    def choose(
        block: int,
        read: Read,
        count: Array | int = vocab_size,
        limit: Limit | None = None,
        noisy: bool = False,
    ) -> None:
        """The best of `count` tokens that `limit` keeps, with noise; NaN is never better."""
        key = token_key(options.seed, options.index)

        def compare(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            best, best_ids = carry
            ids, values = read(number, block)
            if limit is not None:
                values = jnp.where(limit.keeps(ordered_bits(values), ids), values, LOWEST)
            if noisy:
                values = values + gumbel_noise(key, ids, vocab_size)
            better = values > best
            return jnp.where(better, values, best), jnp.where(better, ids, best_ids)

        start = (jnp.full(block, LOWEST, jnp.float32), jnp.zeros(block, jnp.int32))
        best, ids = lax.fori_loop(0, pl.cdiv(count, block), compare, start)
        tokens_ref[row] = jnp.min(jnp.where(best == jnp.max(best), ids, vocab_size))

    def list_tokens(least: Array, num_blocks: Array) -> Array:
        """List the tokens with `least` score or more; how many there are, listed or not."""

        def add(number: Array, count: Array) -> Array:
            ids, values = scores(number, config.block)
            wanted = (values >= least) & (ids < vocab_size)
            new = jnp.sum(wanted.astype(jnp.int32))

            @pl.when(new > 0)
            def write() -> None:
                place = count + jnp.cumsum(wanted.astype(jnp.int32)) - 1
                fits = wanted & (place < config.block)
                place = jnp.where(fits, place, config.block)
                bits = lax.bitcast_convert_type(values, jnp.int32)
                store(listed_ref.at[row, 0, place], ids, mask=fits)
                store(listed_ref.at[row, 1, place], bits, mask=fits)

            return count + new

        count: Array = lax.fori_loop(0, num_blocks, add, jnp.int32(0))
        barrier()
        return count

    def choose_filtered() -> None:
        all_blocks = jnp.int32(pl.cdiv(vocab_size, config.block))

        def blocks(read: Read, num_blocks: Array) -> Row:
            return Row(
                lambda number: read(number, config.block), config.block, num_blocks, vocab_size
            )

        has_min_p = min_p > 0
        whole = blocks(scores, jnp.where(is_filtered, all_blocks, 0))
        best = whole.max(lambda _, values: values, LOWEST)
        by_width = blocks(scores, jnp.where(is_filtered & ~has_min_p, all_blocks, 0))
        found, least, below = best_tokens(by_width, best, options.top_k, options.top_p)
        least = jnp.where(has_min_p, best + jnp.log(min_p), least)
        count = list_tokens(least, jnp.where(has_min_p | found, all_blocks, 0))
        is_listed = (count > 0) & (count <= config.block)
        count = jnp.where(is_listed, count, vocab_size)
        below = jnp.where(is_listed & ~has_min_p, below, 0.0)

        def read(number: Array, block: int) -> tuple[Array, Array]:
            # Masks that the compiler knows in advance, but for a flag: loads stay wide.
            place = number * block + jnp.arange(block)
            exist = place < count
            in_list = is_listed & (place < config.block)
            ids = load(listed_ref.at[row, 0, place], mask=in_list, other=vocab_size)
            bits = load(listed_ref.at[row, 1, place], mask=in_list, other=0)
            others_exist = ~is_listed & (place < vocab_size)
            others = load(scratch_ref.at[row, place], mask=others_exist, other=0)
            values = lax.bitcast_convert_type(jnp.where(is_listed, bits, others), jnp.float32)
            return jnp.where(is_listed, ids, place), jnp.where(exist, values, LOWEST)

        kept = blocks(read, pl.cdiv(count, config.block))
        limit = filter_limit(kept, best, below, min_p, options.top_k, options.top_p)
        choose(config.noise_block, read, count, limit, noisy=True)

    @pl.when(~in_scratch & ~is_sampled)
    def greedy() -> None:
        choose(config.greedy_block, logits)

    @pl.when(~in_scratch & is_sampled)
    def sampled() -> None:
        choose(config.noise_block, tempered, noisy=True)

    @pl.when(in_scratch)
    def with_options() -> None:
        @pl.when(options.has_penalties)
        def count() -> None:
            count_history(scratch_ref, history_ref, row, options, config.block)

        write_scores(
            scratch_ref, logits_ref, rows_ref, bias_ref, masks_ref, row, options, config.block
        )

        @pl.when(~is_sampled)
        def greedy() -> None:
            choose(config.greedy_block, scores)

        pl.when(is_sampled)(choose_filtered)


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
    rest = (slot, index, rows, bias, masks, mask_start, history)
    tokens: Array = _choose_token(config, interpreted(), logits, *rest)
    return tokens


@functools.partial(jax.jit, static_argnums=(0, 1))
def _choose_token(
    config: Config, interpret: bool, logits: Float32[Array, "S V"], *rest: Array
) -> Int32[Array, " S"]:
    """A function of its own, so that calls of equal shapes are traced once in all programs, and
    lowered once in each: the kernel is half of what a step takes."""
    num_rows, vocab_size = logits.shape
    tokens: Array
    tokens, *_ = pl.pallas_call(
        functools.partial(_kernel, config=config),
        out_shape=(
            jax.ShapeDtypeStruct((num_rows,), jnp.int32),
            jax.ShapeDtypeStruct((num_rows, vocab_size), jnp.int32),
            jax.ShapeDtypeStruct((num_rows, 2, config.block), jnp.int32),
        ),
        grid=(num_rows,),
        compiler_params=compiler_params(num_warps=config.num_warps, num_stages=2),
        interpret=interpret,
        name="choose_token",
    )(logits, *rest)
    return tokens
