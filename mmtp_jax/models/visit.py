"""One layer's visit to the paged cache: whose rows, which may be written, and where."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Bool, Int32

from mmtp_jax.cache.layout import Place
from mmtp_jax.cache.pages import Pages, write_rows
from mmtp_jax.models.rows import Rows


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

    def store(
        self, pages: Pages, place: tuple[int, int], values: dict[str, jax.Array]
    ) -> tuple[dict[str, jax.Array], int | Int32[Array, ""], Pages]:
        """Write one value per row into some streams of a group; the group's arrays, the layer's
        index in them, and all pages."""
        group, first = place
        layer = first + self.depth
        rows = self.rows
        arrays = write_rows(
            pages[group],
            values,
            layer,
            rows.tables[group],
            rows.request,
            rows.position,
            self.write,
        )
        return arrays, layer, (*pages[:group], arrays, *pages[group + 1 :])
