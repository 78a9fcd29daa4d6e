"""Everything a request is on the device: functional, donated through every program.

Names follow the exactness rules: `length` committed tokens, `computed` positions holding target KV,
`exact[m]` leading positions at which module m's cache entry is final, if it runs for the request
at all. `hidden` keeps the target's hidden states of the last `lag` computed positions, newest last.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32

from mmtp_jax.cache.layout import CacheLayout
from mmtp_jax.cache.pages import Pages, allocate, copy_page
from mmtp_jax.models.sharding import cache_sharding
from mmtp_jax.sampling.state import SamplingState, empty, write_slot


class Numbers(NamedTuple):
    """What is counted of each request: tokens and positions (see above), the `limit` of its tokens,
    the `drafts` it holds, the positions `target_valid` that the target's cache was given, how many
    modules `ran` in its last step, and whether it is `done` (0 or 1)."""

    length: Int32[Array, "*B"]
    computed: Int32[Array, "*B"]
    limit: Int32[Array, "*B"]
    drafts: Int32[Array, "*B"]
    target_valid: Int32[Array, "*B"]
    ran: Int32[Array, "*B"]
    done: Int32[Array, "*B"]

    @classmethod
    def unpack(cls, packed: Int32[Array, "*B 7"]) -> Numbers:
        return cls(*(packed[..., column] for column in range(len(cls._fields))))

    def pack(self) -> Int32[Array, "*B 7"]:
        return jnp.stack(self, axis=-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EngineState:
    """R slots. `tokens` holds prompt, output and current drafts; it is `num_drafts` wider than
    max_model_len because drafts reach that far past the newest token. `numbers` are every slot's
    `Numbers` side by side. `row_states` are the final hidden states of the latest step's rows,
    `row_targets` the tokens after them (known, or drawn from the row): what log-probabilities are
    computed from, in a program of their own.
    """

    tokens: Int32[Array, "R L"]
    numbers: Int32[Array, "R 7"]
    exact: Int32[Array, "R N"]
    hidden: Float[Array, "R lag H"]
    tables: tuple[Int32[Array, "R MP"], ...]
    pages: Pages
    sampling: SamplingState
    row_states: Float[Array, "T H"]
    row_targets: Int32[Array, " T"]

    @property
    def num_slots(self) -> int:
        return int(self.numbers.shape[0])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdmissionArrays:
    """A requests entering different slots, in one array that travels at once. `numbers` = slot,
    length, computed, exact, target_valid, limit; a slot past the end is no request. `widths` are
    those of the fields, in the order below.
    """

    packed: Int32[Any, "A X"]
    widths: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def empty(cls, state: EngineState, count: int) -> AdmissionArrays:
        """Room for `count` requests, none of which is there yet."""
        groups = len(state.tables)
        fixed = (6, groups, groups, state.sampling.rows.shape[1], state.tokens.shape[1])
        widths = fixed + tuple(table.shape[1] for table in state.tables)
        arrays = cls(np.zeros((count, sum(widths)), np.int32), widths)
        arrays.numbers[:, 0] = state.num_slots
        return arrays

    @property
    def numbers(self) -> Int32[Any, "A 6"]:
        return self._field(0)

    @property
    def copy_source(self) -> Int32[Any, "A G"]:
        return self._field(1)

    @property
    def copy_target(self) -> Int32[Any, "A G"]:
        return self._field(2)

    @property
    def sampling(self) -> Int32[Any, "A C"]:
        return self._field(3)

    @property
    def tokens(self) -> Int32[Any, "A L"]:
        return self._field(4)

    @property
    def tables(self) -> tuple[Int32[Any, "A MP"], ...]:
        return tuple(self._field(index) for index in range(5, len(self.widths)))

    def _field(self, index: int) -> Int32[Any, "A _"]:
        first = sum(self.widths[:index])
        return self.packed[:, first : first + self.widths[index]]


def initial_state(
    layout: CacheLayout,
    *,
    num_slots: int,
    max_model_len: int,
    num_modules: int,
    num_drafts: int,
    lag: int,
    num_rows: int,
    hidden_size: int,
    vocab_size: int,
    num_pages: tuple[int, ...],
    page_size: int,
    dtype: np.dtype,
) -> EngineState:
    """All slots empty. `lag` hidden states are kept: max(num_modules, 1) suffice for any accepted
    count where all modules run in every step."""
    zero = jnp.zeros(num_slots, jnp.int32)
    width = -(-max_model_len // page_size)
    return EngineState(
        tokens=jnp.zeros((num_slots, max_model_len + max(num_drafts, 1)), jnp.int32),
        numbers=Numbers(zero, zero, zero, zero, zero, zero, done=zero + 1).pack(),
        exact=jnp.zeros((num_slots, num_modules), jnp.int32),
        hidden=jnp.zeros((num_slots, lag, hidden_size), dtype),
        tables=tuple(jnp.zeros((num_slots, width), jnp.int32) for _ in layout.groups),
        pages=allocate(layout, num_pages, page_size, dtype),
        sampling=empty(num_slots, vocab_size, width=num_drafts + 1),
        row_states=jnp.zeros((num_rows, hidden_size), dtype),
        row_targets=jnp.zeros(num_rows, jnp.int32),
    )


def state_sharding(mesh: Mesh, layout: CacheLayout, state: EngineState) -> EngineState:
    """The sharding of every array over a mesh: pages are spread, everything else is copied."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    copied = jax.tree.map(lambda _: everywhere, state)
    return dataclasses.replace(copied, pages=cache_sharding(mesh, layout))


def admit(state: EngineState, new: AdmissionArrays) -> EngineState:
    """Put requests into slots: every per-slot field is reset, shared pages are entered into the
    tables, partly reused pages are copied, one request after the other."""
    slot, length, computed, exact, target_valid, limit = (new.numbers[:, i] for i in range(6))
    none = jnp.zeros_like(slot)
    numbers = Numbers(length, computed, limit, none, target_valid, none, none)
    pages = state.pages
    for source, target in zip(new.copy_source, new.copy_target, strict=True):
        pages = copy_page(pages, source, target)

    def put(array: Array, rows: Array | int) -> Array:
        return array.at[slot].set(rows, mode="drop")

    return EngineState(
        tokens=put(state.tokens, new.tokens),
        numbers=put(state.numbers, numbers.pack()),
        exact=put(state.exact, exact[:, None]),
        hidden=put(state.hidden, 0),
        tables=tuple(
            put(table, rows) for table, rows in zip(state.tables, new.tables, strict=True)
        ),
        pages=pages,
        sampling=write_slot(state.sampling, slot, new.sampling),
        row_states=state.row_states,
        row_targets=state.row_targets,
    )
