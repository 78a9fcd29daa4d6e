"""What programs of the kernels have in common: their rows, their keys, and sums of parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels._compat import load, store
from pallas_kernels.ragged_paged_attention.config import Config
from pallas_kernels.ragged_paged_attention.tiles import Column

# Below every score; finite, since -inf - -inf is not a number.
LOWEST = -1e30
LOG2E = math.log2(math.e)

# Numbers that a program of 128 threads loads at once when it adds up parts: 128 registers each.
_LOADED = 16384

Entry = Callable[[Column], Array]  # of a tile
# Of rows: highest scores (as powers of two), sums of weights, weighted values.
Carry = tuple[Array, Array, Array]


@dataclass(frozen=True)
class Task:
    """What the kernels are compiled for."""

    config: Config
    scale: float
    window: int | None
    softcap: float | None
    value_dim: int
    values_are_keys: bool
    extent: int | None
    sinks: bool

    @property
    def transforms_scores(self) -> bool:
        """Whether scores are more than products times the scale."""
        return self.extent is not None or self.softcap is not None

    @property
    def value_span(self) -> int:
        """The values' size, padded."""
        return max(pl.next_power_of_2(self.value_dim), 16)


def spans(size: int) -> list[tuple[int, int]]:
    """`size` entries as blocks (first, padded length) of powers of two, 16 or more: 192 is 128 and
    64, so that little is computed for nothing."""
    whole = pl.next_power_of_2(size + 1) // 2
    rest = size - whole
    if whole < 16 or rest == 0 or pl.next_power_of_2(rest) == whole:
        return [(0, max(pl.next_power_of_2(size), 16))]
    return [(0, whole), (whole, max(pl.next_power_of_2(rest), 16))]


@dataclass(frozen=True)
class Tile:
    """Rows of a tile: which there are (`real`), their places in q and their positions."""

    real: Array
    token: Array
    head: Array
    position: Array

    @staticmethod
    def of(entry: Entry, head: Array, row: Array, group: int) -> Tile:
        """Rows `row` of the tile, for a key head."""
        row = entry(Column.FIRST_ROW) + row
        real = row < entry(Column.NUM_ROWS)
        token = row // group
        return Tile(
            real=real,
            token=entry(Column.FIRST_TOKEN) + token,
            head=head * group + row % group,
            position=jnp.where(real, entry(Column.POSITION) + token, -1),
        )


@dataclass(frozen=True)
class Keys:
    """The keys of a tile: some row sees [oldest, newest], in blocks from `first_block` up to
    `end_block`; every row sees the blocks from `first_whole` up to `end_whole` whole. They are cut
    into `num_parts`.
    """

    any_row: Array
    oldest: Array
    newest: Array
    first_block: Array
    end_block: Array
    first_whole: Array
    end_whole: Array
    blocks_per_part: Array
    num_parts: Array

    @staticmethod
    def of(entry: Entry, task: Task, group: int) -> Keys:
        config, block_k = task.config, task.config.block_k
        start, first_row, num_rows = (
            entry(Column.POSITION),
            entry(Column.FIRST_ROW),
            entry(Column.NUM_ROWS),
        )
        first = start + first_row // group
        last = start + (jnp.minimum(first_row + config.block_m, num_rows) - 1) // group
        newest = jnp.where(entry(Column.NUM_KEYS) > 0, last, -1)
        oldest = first_whole = jnp.int32(0)
        if task.window is not None:
            oldest = jnp.maximum(first - task.window + 1, 0)
            first_whole = pl.cdiv(jnp.maximum(last - task.window + 1, 0), block_k)
        first_block, end_block = oldest // block_k, (newest + block_k) // block_k
        num_blocks = end_block - first_block
        each = jnp.maximum(pl.cdiv(num_blocks, config.splits), pl.cdiv(config.split_keys, block_k))
        return Keys(
            any_row=first_row < num_rows,
            oldest=oldest,
            newest=newest,
            first_block=first_block,
            end_block=end_block,
            first_whole=first_whole,
            end_whole=jnp.maximum(first + 1, 0) // block_k,
            blocks_per_part=each,
            num_parts=jnp.maximum(pl.cdiv(num_blocks, each), 1),
        )


def finish(tile: Tile, out_ref: Any, sinks_ref: Any, task: Task, keys: Keys, carry: Carry) -> None:
    """Add the sinks, divide and write. Rows that see nothing (padding) come out as zeros."""
    top, total, acc = carry
    if task.sinks:
        sink = load(sinks_ref.at[tile.head], mask=tile.real, other=0).astype(jnp.float32) * LOG2E
        new_top = jnp.where(keys.newest >= 0, jnp.maximum(top, sink), top)
        rescale = jnp.exp2(top - new_top)
        total = total * rescale + jnp.exp2(sink - new_top)
        acc = acc * rescale[:, None]
    out = acc / jnp.where(total > 0, total, 1.0)[:, None]
    dim = jnp.arange(task.value_span)[None, :]
    row = jnp.where(tile.real, tile.token, out_ref.shape[0])
    store(
        out_ref.at[row[:, None], tile.head[:, None], dim],
        out.astype(out_ref.dtype),
        mask=tile.real[:, None] & (dim < task.value_dim),
    )


@dataclass(frozen=True)
class Sums:
    """Scratch memory of the parts of a tile and head (`place`): weighted values [parts, rows, Dv],
    highest scores and sums of weights [parts, 2, rows], of the rows `row` that are `real`.
    """

    values_ref: Any
    stats_ref: Any
    place: tuple[Array, Array]
    row: Array
    real: Array

    def write(self, part: Array, carry: Carry) -> None:
        """Keep a part's sums."""
        top, total, acc = carry
        row = jnp.where(self.real, self.row, self.stats_ref.shape[4])
        dim = jnp.arange(acc.shape[1])[None, :]
        exists = jnp.broadcast_to(self.real[:, None], acc.shape)
        store(self.values_ref.at[*self.place, part, row[:, None], dim], acc, mask=exists)
        store(self.stats_ref.at[*self.place, part, 0, row], top, mask=self.real)
        store(self.stats_ref.at[*self.place, part, 1, row], total, mask=self.real)

    def added(self, num_parts: Array) -> Carry:
        """The sums of the first `num_parts` parts."""
        parts, size = self.values_ref.shape[2], self.values_ref.shape[4]
        num_rows = self.row.shape[0]
        dim = jnp.arange(size)[None, None, :]

        def load_stat(part: Array, kind: int, other: float) -> Array:
            exists = (part < num_parts)[:, None] & self.real[None, :]
            where = self.stats_ref.at[*self.place, part[:, None], kind, self.row[None, :]]
            return load(where, mask=exists, other=other)

        top = jnp.max(load_stat(jnp.arange(pl.next_power_of_2(parts)), 0, LOWEST), axis=0)
        total = jnp.zeros(num_rows, jnp.float32)
        acc = jnp.zeros((num_rows, size), jnp.float32)
        together = min(max(_LOADED // (num_rows * size), 1), pl.next_power_of_2(parts))
        for first in range(0, parts, together):
            part = first + jnp.arange(together)
            exists = (part < num_parts)[:, None] & self.real[None, :]
            values = load(
                self.values_ref.at[*self.place, part[:, None, None], self.row[None, :, None], dim],
                mask=jnp.broadcast_to(exists[:, :, None], (together, num_rows, size)),
                other=0,
            )
            weights = jnp.exp2(load_stat(part, 0, LOWEST) - top[None, :])
            total += jnp.sum(load_stat(part, 1, 0) * weights, axis=0)
            acc += jnp.sum(values * weights[:, :, None], axis=0)
        return top, total, acc
