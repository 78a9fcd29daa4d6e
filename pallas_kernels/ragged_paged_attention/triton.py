"""Triton-lowered Pallas kernel: one program per tile of query rows, key head and part of the keys.

A program walks over its keys in blocks gathered through the page table, with an online softmax in
base 2. Where a tile's keys are split, every part writes its sums to scratch memory and takes a
ticket; the part that takes the last one adds all of them up, so that nothing is launched after the
kernel (stream-K's fix-up, arXiv 2301.03598; split keys: Flash-Decoding).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels._compat import compiler_params, dot, interpreted, load, store, take_ticket
from pallas_kernels.ragged_paged_attention.config import Config, config_for, power_of_two
from pallas_kernels.ragged_paged_attention.tiles import Column, make_tiles

# Below every score; finite, since -inf - -inf is not a number.
_LOWEST = -1e30
_LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class _Task:
    """What the kernel is compiled for, besides its blocks."""

    config: Config
    scale: float
    window: int | None
    softcap: float | None
    value_dim: int
    values_are_keys: bool
    extent: int | None
    sinks: bool


def _spans(size: int) -> list[tuple[int, int]]:
    """`size` entries as blocks (first, padded length) of powers of two, 16 or more: 192 is 128 and
    64, so that little is computed for nothing."""
    whole = power_of_two(size + 1) // 2
    rest = size - whole
    if whole < 16 or rest == 0 or power_of_two(rest) == whole:
        return [(0, max(power_of_two(size), 16))]
    return [(0, whole), (whole, max(power_of_two(rest), 16))]


def _kernel(
    tiles_ref: Any,
    layer_ref: Any,
    table_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    by_distance_ref: Any,
    sinks_ref: Any,
    tickets_ref: Any,
    out_ref: Any,
    sums_ref: Any,
    stats_ref: Any,
    *,
    task: _Task,
) -> None:
    config, block_m, block_k = task.config, task.config.block_m, task.config.block_k
    page, num_kv_heads, key_dim = k_ref.shape[2:]
    group = q_ref.shape[1] // num_kv_heads
    tile, head, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)

    def entry(column: Column) -> Array:
        return tiles_ref[tile, column]

    request, num_keys = entry(Column.REQUEST), entry(Column.NUM_KEYS)
    first_row, num_rows = entry(Column.FIRST_ROW), entry(Column.NUM_ROWS)
    first_token, start = entry(Column.FIRST_TOKEN), entry(Column.POSITION)
    layer = layer_ref[0]

    # Keys that some row of the tile sees: [oldest, newest].
    last_row = jnp.minimum(first_row + block_m, num_rows) - 1
    newest = jnp.where(num_keys > 0, start + last_row // group, -1)
    oldest = jnp.int32(0)
    if task.window is not None:
        oldest = jnp.maximum(start + first_row // group - task.window + 1, 0)
    first_block, end_block = oldest // block_k, newest // block_k + 1
    num_blocks = end_block - first_block
    each = jnp.maximum(pl.cdiv(num_blocks, config.splits), pl.cdiv(config.split_keys, block_k))
    num_parts = jnp.maximum(pl.cdiv(num_blocks, each), 1)

    @pl.when((first_row < num_rows) & (part < num_parts))
    def attend() -> None:
        row = first_row + jnp.arange(block_m)
        real = row < num_rows
        token, lane = row // group, row % group
        position = jnp.where(real, start + token, -1)
        q_row, q_head = first_token + token, head * group + lane
        spans = _spans(key_dim)

        def entries(first: int, length: int) -> tuple[Array, Array]:
            dim = first + jnp.arange(length)
            return dim[None, :], (dim < key_dim)[None, :]

        def query(span: tuple[int, int]) -> Array:
            dim, exists = entries(*span)
            where = q_ref.at[q_row[:, None], q_head[:, None], dim]
            return load(where, mask=real[:, None] & exists, other=0)

        queries = [query(span) for span in spans]
        value_span = max(power_of_two(task.value_dim), 16)

        def block(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, acc = carry
            key = index * block_k + jnp.arange(block_k)
            seen = (key >= oldest) & (key <= newest)
            number = table_ref[request, jnp.minimum(key // page, table_ref.shape[1] - 1)]
            offset = key % page

            def gathered(ref: Any, span: tuple[int, int], size: int) -> Array:
                dim = (span[0] + jnp.arange(span[1]))[None, :]
                where = ref.at[layer, number[:, None], offset[:, None], head, dim]
                return load(where, mask=seen[:, None] & (dim < size), other=0)

            keys = [gathered(k_ref, span, key_dim) for span in spans]
            scores = sum(
                dot(q, k, trans_b=True, allow_tf32=False)
                for q, k in zip(queries, keys, strict=True)
            )
            distance = position[:, None] - key[None, :]
            visible = distance >= 0
            if task.window is not None:
                visible &= distance < task.window
            scores = scores * task.scale
            if task.extent is not None:
                near = visible & (distance < task.extent)
                where = by_distance_ref.at[
                    q_row[:, None], q_head[:, None], jnp.clip(distance, 0, task.extent - 1)
                ]
                scores += load(where, mask=near & real[:, None], other=0).astype(jnp.float32)
            if task.softcap is not None:
                scores = task.softcap * jnp.tanh(scores / task.softcap)
            scores = jnp.where(visible, scores * _LOG2E, _LOWEST)

            new_top = jnp.maximum(top, jnp.max(scores, axis=1))
            weights = jnp.exp2(scores - new_top[:, None])
            rescale = jnp.exp2(top - new_top)
            total = total * rescale + jnp.sum(weights, axis=1)
            if task.values_are_keys:
                values = keys[0]
            else:
                values = gathered(v_ref, (0, value_span), task.value_dim)
            added = dot(weights.astype(values.dtype), values, allow_tf32=False)
            return new_top, total, acc * rescale[:, None] + added

        begin = first_block + part * each
        empty = (
            jnp.full(block_m, _LOWEST, jnp.float32),
            jnp.zeros(block_m, jnp.float32),
            jnp.zeros((block_m, value_span), jnp.float32),
        )
        top, total, acc = jax.lax.fori_loop(
            begin, jnp.minimum(begin + each, end_block), block, empty
        )
        dim = jnp.arange(value_span)[None, :]
        exists = real[:, None] & (dim < task.value_dim)

        def finish(top: Array, total: Array, acc: Array) -> None:
            if task.sinks:
                sink = load(sinks_ref.at[q_head], mask=real, other=0).astype(jnp.float32) * _LOG2E
                new_top = jnp.where(num_keys > 0, jnp.maximum(top, sink), top)
                rescale = jnp.exp2(top - new_top)
                total = total * rescale + jnp.exp2(sink - new_top)
                acc = acc * rescale[:, None]
            # Padding rows see nothing and come out as zeros.
            out = acc / jnp.where(total > 0, total, 1.0)[:, None]
            token_row = jnp.where(real, q_row, out_ref.shape[0])[:, None]
            target = out_ref.at[token_row, q_head[:, None], dim]
            store(target, out.astype(out_ref.dtype), mask=exists)

        if config.splits == 1:
            finish(top, total, acc)
            return

        @pl.when(num_parts == 1)
        def alone() -> None:
            finish(top, total, acc)

        @pl.when(num_parts > 1)
        def shared() -> None:
            lane = jnp.arange(block_m)

            def place(index: Array) -> tuple[Any, Any, Any]:
                """Where a part keeps its sums, tops and totals. What no row needs is not kept."""
                row = jnp.where(real, lane, block_m)
                return (
                    sums_ref.at[tile, head, index, row[:, None], dim],
                    stats_ref.at[tile, head, index, 0, row],
                    stats_ref.at[tile, head, index, 1, row],
                )

            for where, value, mask in zip(
                place(part), (acc, top, total), (exists, real, real), strict=True
            ):
                store(where, value, mask=mask)
            ticket = take_ticket(tickets_ref, (tile, head))

            @pl.when(ticket == num_parts - 1)
            def last() -> None:
                # Zero again for the next call.
                tickets_ref[tile, head] = 0

                def add(
                    index: Array, carry: tuple[Array, Array, Array]
                ) -> tuple[Array, Array, Array]:
                    top, total, acc = carry
                    others = [
                        load(where, mask=mask, other=other)
                        for where, mask, other in zip(
                            place(index), (exists, real, real), (0.0, _LOWEST, 0.0), strict=True
                        )
                    ]
                    new_top = jnp.maximum(top, others[1])
                    mine, its = jnp.exp2(top - new_top), jnp.exp2(others[1] - new_top)
                    acc = acc * mine[:, None] + others[0] * its[:, None]
                    return new_top, total * mine + others[2] * its, acc

                finish(*jax.lax.fori_loop(0, num_parts, add, empty))


def ragged_paged_attention(
    q: Float[Array, "T Hq D"],
    k_pages: Float[Array, "L P page Hkv D"],
    v_pages: Float[Array, "L P page Hkv Dv"] | None,
    layer: int | Int[Array, ""],
    page_table: Int32[Array, "B MP"],
    cu_q_lens: Int32[Array, "B+1"],
    kv_lens: Int32[Array, " B"],
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Float[Array, " Hq"] | None,
    rel_rows: Float[Array, "T Hq d_rel"] | None,
    rel_table: Float[Array, "d_rel E"] | None,
    value_dim: int | None,
    config: Config | None = None,
) -> Float[Array, "T Hq Dv"]:
    """See `api.ragged_paged_attention`. Interpreted on a CPU."""
    num_tokens, num_heads, key_dim = q.shape
    page, num_kv_heads = k_pages.shape[2:4]
    group = num_heads // num_kv_heads
    if config is None:
        config = config_for(
            num_tokens=num_tokens,
            num_requests=kv_lens.shape[0],
            num_kv_heads=num_kv_heads,
            group=group,
            key_dim=key_dim,
            itemsize=k_pages.dtype.itemsize,
            window=window,
            positions=page_table.shape[1] * page,
        )
    by_distance = None
    if rel_rows is not None and rel_table is not None:
        by_distance = jnp.einsum("thr,re->the", rel_rows, rel_table.astype(rel_rows.dtype))
    if value_dim is None:
        assert v_pages is not None
        size = v_pages.shape[4]
    else:
        size = value_dim
        assert _spans(key_dim)[0][1] == power_of_two(size), (
            "keys that are values too begin with them"
        )
    task = _Task(
        config=config,
        scale=scale,
        window=window,
        softcap=softcap,
        value_dim=size,
        values_are_keys=v_pages is None,
        extent=None if by_distance is None else by_distance.shape[2],
        sinks=sinks is not None,
    )
    tiles = make_tiles(
        kv_lens, cu_q_lens, num_tokens=num_tokens, group=group, block_m=config.block_m
    )
    # Every call leaves the tickets as it found them, so XLA may give one array to all of a step.
    shape = (tiles.shape[0], num_kv_heads)
    parts = config.splits if config.splits > 1 else 0
    arrays = {
        "tiles": tiles,
        "layer": jnp.asarray(layer, jnp.int32).reshape(1),
        "table": page_table,
        "q": q,
        "k": k_pages,
        "v": v_pages,
        "by_distance": by_distance,
        "sinks": sinks,
        "tickets": jnp.zeros(shape, jnp.int32) if parts else None,
    }
    given = {name: array for name, array in arrays.items() if array is not None}
    value_span = max(power_of_two(size), 16)
    scratch = {
        "sums": (*shape, parts, config.block_m, value_span),
        "stats": (*shape, parts, 2, config.block_m),
    }
    outputs = [jax.ShapeDtypeStruct((num_tokens, num_heads, size), q.dtype)]
    if parts:
        outputs += [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in scratch.values()]

    def kernel(*refs: Any) -> None:
        found = dict(zip(given, refs, strict=False))
        out, *kept = refs[len(given) :]
        sums, stats = kept or (None, None)
        _kernel(*(found.get(name) for name in arrays), out, sums, stats, task=task)

    out, *_ = pl.pallas_call(
        kernel,
        out_shape=outputs,
        grid=(tiles.shape[0], num_kv_heads, config.splits),
        compiler_params=compiler_params(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpreted(),
        name="ragged_paged_attention",
    )(*given.values())
    return out
