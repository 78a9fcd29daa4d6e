"""Triton-lowered Pallas kernel: one program per tile of query rows, key head and part of the keys.

A program walks over its keys in blocks gathered through the page table, with an online softmax in
base 2. Where a tile's keys are split, every part writes its sums to scratch memory and takes a
ticket; the part that takes the last one adds all of them up, so that nothing is launched after the
kernel (stream-K's fix-up, arXiv 2301.03598; split keys: Flash-Decoding). Many parts are added up by
a second kernel (combine.py).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels._compat import (
    compiler_params,
    device_kind,
    dot,
    interpreted,
    load,
    scaled_exp2,
    take_ticket,
)
from pallas_kernels.ragged_paged_attention.combine import combine
from pallas_kernels.ragged_paged_attention.config import Call, Config, choose_config
from pallas_kernels.ragged_paged_attention.program import (
    LOG2E,
    LOWEST,
    Carry,
    Keys,
    Sums,
    Task,
    Tile,
    finish,
    spans,
)
from pallas_kernels.ragged_paged_attention.tiles import Column, make_tiles


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
    task: Task,
) -> None:
    config, block_m, block_k = task.config, task.config.block_m, task.config.block_k
    page, num_kv_heads, key_dim = k_ref.shape[2:]
    group = q_ref.shape[1] // num_kv_heads
    index, head, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)

    def entry(column: Column) -> Array:
        return tiles_ref[index, column]

    keys = Keys.of(entry, task, group)
    request, layer = entry(Column.REQUEST), layer_ref[0]

    @pl.when(keys.any_row & (part < keys.num_parts))
    def attend() -> None:
        tile = Tile.of(entry, head, jnp.arange(block_m), group)
        key_spans = spans(key_dim)

        def query(first: int, length: int) -> Array:
            dim = (first + jnp.arange(length))[None, :]
            where = q_ref.at[tile.token[:, None], tile.head[:, None], dim]
            return load(where, mask=tile.real[:, None] & (dim < key_dim), other=0)

        queries = [query(*span) for span in key_spans]
        unit = 1.0 if task.transforms_scores else task.scale * LOG2E

        def block(edge: bool, number: Array, carry: Carry) -> Carry:
            """One block of keys; at an `edge` some rows do not see all of them."""
            top, total, acc = carry
            key = number * block_k + jnp.arange(block_k)
            seen = (key >= keys.oldest) & (key <= keys.newest)
            # One table entry per key, many of them equal: a block [pages, page, D] would have to
            # change its layout in shared memory (an H200 took 1.7 times as long).
            column = jnp.minimum(key // page, table_ref.shape[1] - 1)
            page_of, offset = table_ref[request, column], key % page

            def gathered(ref: Any, first: int, length: int, size: int, mask: bool) -> Array:
                dim = (first + jnp.arange(length))[None, :]
                where = ref.at[layer, page_of[:, None], offset[:, None], head, dim]
                exists = seen[:, None] if mask else None
                if first + length > size:
                    exists = dim < size if exists is None else exists & (dim < size)
                if exists is None:
                    return load(where)
                return load(where, mask=jnp.broadcast_to(exists, (block_k, length)), other=0)

            blocks = [
                gathered(k_ref, *span, key_dim, edge and task.values_are_keys) for span in key_spans
            ]
            scores = sum(
                dot(q, k, trans_b=True, allow_tf32=False)
                for q, k in zip(queries, blocks, strict=True)
            )
            distance = tile.position[:, None] - key[None, :]
            if task.transforms_scores:
                scores = scores * task.scale
                if task.extent is not None:
                    near = tile.real[:, None] & (distance >= 0) & (distance < task.extent)
                    where = by_distance_ref.at[
                        tile.token[:, None],
                        tile.head[:, None],
                        jnp.clip(distance, 0, task.extent - 1),
                    ]
                    scores += load(where, mask=near, other=0).astype(jnp.float32)
                if task.softcap is not None:
                    scores = task.softcap * jnp.tanh(scores / task.softcap)
                scores = scores * LOG2E
            if edge:
                visible = distance >= 0
                if task.window is not None:
                    visible &= distance < task.window
                scores = jnp.where(visible, scores, LOWEST)

            # `unit` turns scores into powers of two in the same instruction that subtracts the top.
            new_top = jnp.maximum(top, jnp.max(scores, axis=1))
            shift = jnp.where(new_top > LOWEST, new_top * unit, 0.0)
            weights = scaled_exp2(scores, unit, shift[:, None])
            rescale = scaled_exp2(top, unit, shift)
            total = total * rescale + jnp.sum(weights, axis=1)
            values = (
                blocks[0]
                if task.values_are_keys
                else gathered(v_ref, 0, task.value_span, task.value_dim, edge)
            )
            added = dot(weights.astype(values.dtype), values, allow_tf32=False)
            return new_top, total, acc * rescale[:, None] + added

        begin = keys.first_block + part * keys.blocks_per_part
        end = jnp.minimum(begin + keys.blocks_per_part, keys.end_block)
        carry = (
            jnp.full(block_m, LOWEST, jnp.float32),
            jnp.zeros(block_m, jnp.float32),
            jnp.zeros((block_m, task.value_span), jnp.float32),
        )

        def walk(edge: bool, begin: Array, end: Array, carry: Carry) -> Carry:
            return jax.lax.fori_loop(begin, end, lambda n, c: block(edge, n, c), carry)

        if config.edges_apart:
            # Blocks that every row sees whole need no masks.
            whole = jnp.clip(keys.first_whole, begin, end)
            edge = jnp.clip(keys.end_whole, whole, end)
            if task.window is not None:
                carry = walk(True, begin, whole, carry)
            carry = walk(False, whole, edge, carry)
            carry = walk(True, edge, end, carry)
        else:
            carry = walk(True, begin, end, carry)
        carry = (carry[0] * unit, *carry[1:])

        if config.splits == 1:
            finish(tile, out_ref, sinks_ref, task, keys, carry)
            return
        kept = Sums(sums_ref, stats_ref, (index, head), jnp.arange(block_m), tile.real)

        @pl.when(keys.num_parts == 1)
        def alone() -> None:
            finish(tile, out_ref, sinks_ref, task, keys, carry)

        @pl.when(keys.num_parts > 1)
        def shared() -> None:
            kept.write(part, carry)
            if config.combines_apart:
                return
            ticket = take_ticket(tickets_ref, (index, head))

            @pl.when(ticket == keys.num_parts - 1)
            def last() -> None:
                tickets_ref[index, head] = 0  # as the next call needs it
                added = kept.added(keys.num_parts)
                finish(tile, out_ref, sinks_ref, task, keys, added)


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
    """See `api.ragged_paged_attention`. Pages must hold a power of two of positions. Interpreted on
    a CPU."""
    num_tokens, num_heads, key_dim = q.shape
    page, num_kv_heads = k_pages.shape[2:4]
    if page != pl.next_power_of_2(page):
        raise ValueError(f"pages must hold a power of two of positions, got {page}")
    group = num_heads // num_kv_heads
    if config is None:
        call = Call(
            num_tokens=num_tokens,
            num_requests=kv_lens.shape[0],
            num_kv_heads=num_kv_heads,
            group=group,
            key_dim=key_dim,
            itemsize=k_pages.dtype.itemsize,
            window=window,
            positions=page_table.shape[1] * page,
            relative=rel_rows is not None,
        )
        config = choose_config(device_kind(), call)
    by_distance = None
    if rel_rows is not None and rel_table is not None:
        by_distance = jnp.einsum("thr,re->the", rel_rows, rel_table.astype(rel_rows.dtype))
    if value_dim is None:
        assert v_pages is not None
        size = v_pages.shape[4]
    else:
        size = value_dim
        if spans(key_dim)[0][1] != pl.next_power_of_2(size):
            raise ValueError(f"keys of {key_dim} entries cannot begin with values of {size}")
    task = Task(
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
    shape = (tiles.shape[0], num_kv_heads)
    is_split = config.splits > 1
    tickets = is_split and not config.combines_apart
    arrays = {
        "tiles": tiles,
        "layer": jnp.asarray(layer, jnp.int32).reshape(1),
        "table": page_table,
        "q": q,
        "k": k_pages,
        "v": v_pages,
        "by_distance": by_distance,
        "sinks": sinks,
        # Every call leaves the tickets as it found them: XLA may share one array of a program.
        "tickets": jnp.zeros(shape, jnp.int32) if tickets else None,
    }
    given = {name: array for name, array in arrays.items() if array is not None}
    outputs = [jax.ShapeDtypeStruct((num_tokens, num_heads, size), q.dtype)]
    if is_split:
        parts = (*shape, config.splits)
        outputs += [
            jax.ShapeDtypeStruct((*parts, config.block_m, task.value_span), jnp.float32),
            jax.ShapeDtypeStruct((*parts, 2, config.block_m), jnp.float32),
        ]

    def kernel(*refs: Any) -> None:
        found = dict(zip(given, refs, strict=False))
        out, *scratch = refs[len(given) :]
        sums, stats = scratch or (None, None)
        found |= {"out": out, "sums": sums, "stats": stats}
        names = (*arrays, "out", "sums", "stats")
        _kernel(**{f"{name}_ref": found.get(name) for name in names}, task=task)

    out, *sums = pl.pallas_call(
        kernel,
        out_shape=outputs,
        grid=(tiles.shape[0], num_kv_heads, config.splits),
        compiler_params=compiler_params(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpreted(),
        name="ragged_paged_attention",
    )(*given.values())
    if is_split and config.combines_apart:
        values, stats = sums
        return combine(out, values, stats, tiles, sinks, task)
    return out
