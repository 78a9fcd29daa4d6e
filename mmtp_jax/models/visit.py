"""One layer's visit to the paged cache: whose rows, which may be written, and where."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Bool, Int32

from mmtp_jax.cache.layout import Place
from mmtp_jax.cache.pages import Pages, slots_of
from mmtp_jax.models.rows import Rows
from mmtp_jax.models.sharding import kernels
from pallas_kernels.kv_write import kv_write


@dataclasses.dataclass(frozen=True)
class Visit:
    """`write` marks the rows whose entries are new; the others read what the cache holds.

    `depth` is added to the place's layer indices: the scan index over stacked modules. `ahead` is
    how far the consumed token is ahead of the row's position (0 in the target).
    """

    rows: Rows
    write: Bool[Array, " T"]
    place: Place
    depth: int | Int32[Array, ""] = 0
    ahead: int | Int32[Array, ""] = 0

    def slots(self, pages: Pages, group: int) -> Int32[Array, " T"]:
        """Where the rows' new entries of a group go; -1 for rows that write none."""
        rows = self.rows
        size = next(iter(pages[group].values())).shape[2]
        return slots_of(rows.tables[group], rows.request, rows.position, self.write, size)

    def store(
        self, pages: Pages, place: tuple[int, int], values: dict[str, jax.Array]
    ) -> tuple[dict[str, jax.Array], int | Int32[Array, ""], Pages]:
        """Write one value per row into some streams of a group; the group's arrays, the layer's
        index in them, and all pages."""
        group, first = place
        layer = first + self.depth
        slots = self.slots(pages, group)
        arrays = kv_write(pages[group], values, layer, slots, implementation=kernels())
        return arrays, layer, replaced(pages, group, arrays)


def replaced(pages: Pages, group: int, arrays: dict[str, jax.Array]) -> Pages:
    """`pages` with other arrays of a group."""
    return (*pages[:group], arrays, *pages[group + 1 :])
