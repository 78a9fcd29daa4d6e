"""Target and modules over whole sequences: what the engine computes bit by bit, at once.

Every module sees the true tokens ("teacher forcing"), as its cache entries in the engine are those
of committed tokens. So nothing differs between training and drafting but the tail of the drafts
themselves. The module code is the engine's (`speculative.module.run_module`), over a cache that is
as long as the sequences and lives for one call.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from mmtp_jax.cache.layout import CacheLayout, Place
from mmtp_jax.cache.pages import Pages, allocate
from mmtp_jax.models.model import Model, ModelGraph
from mmtp_jax.models.mtp import MTPModule, runs
from mmtp_jax.models.rows import Rows, pack_rows
from mmtp_jax.models.visit import Visit
from mmtp_jax.speculative.module import run_module
from mmtp_jax.train.options import PAGE
from pallas_kernels._implementations import differentiable


def whole_rows(num_sequences: int, length: int, num_groups: int) -> Rows:
    """All rows of sequences of `length` tokens, whose pages follow each other."""
    width = length // PAGE
    table = 1 + jnp.arange(num_sequences * width, dtype=jnp.int32).reshape(num_sequences, width)
    count = jnp.full(num_sequences, length, jnp.int32)
    start = jnp.zeros(num_sequences, jnp.int32)
    return pack_rows(start, count, (table,) * num_groups, num_sequences * length)


def _pages(layout: CacheLayout, rows: Rows, dtype: np.dtype) -> Pages:
    """Zeroed pages for `rows`."""
    num_pages = 1 + rows.tables[0].size
    return allocate(layout, (num_pages,) * len(layout.groups), PAGE, dtype)


def target_states(
    graph: ModelGraph, model: Model, tokens: Int32[Array, "B S"]
) -> tuple[Float[Array, "T H"], Float[Array, "T H"]]:
    """The target's hidden states, before and after its final norm; without derivatives."""
    rows = whole_rows(tokens.shape[0], tokens.shape[1], len(graph.layout.groups))
    dtype = model.target.embed.weight[...].dtype
    pages = _pages(graph.layout, rows, dtype)
    raw, _ = model.target(tokens.reshape(-1), rows, rows.real, pages, graph.layout.target)
    return jax.lax.stop_gradient((raw, model.target.norm(raw)))


def module_states(
    graph: ModelGraph, model: Model, tokens: Int32[Array, "B S"], feed: Float[Array, "T H"]
) -> Float[Array, "N T H"]:
    """What every module gives its head at every row: at position q, module m predicts token
    q + 2 + m (rows for which that is beyond the sequence mean nothing).

    `feed` are the target's states that the modules are fed with. Values inside a module are
    computed again for its derivatives: those of eight modules would not fit.
    """
    mtp = graph.config.mtp
    assert mtp is not None and model.mtp is not None
    rows = whole_rows(tokens.shape[0], tokens.shape[1], len(graph.layout.groups))
    states = []
    for (first, count), stacked in zip(runs(mtp), model.mtp.runs, strict=True):
        module_graph, params = nnx.split(stacked)
        for depth in range(count):
            own = jax.tree.map(lambda leaf, depth=depth: leaf[depth], params)
            run = functools.partial(_run, graph, model, module_graph, first + depth, tokens, rows)
            output, normed = jax.checkpoint(run)(own, feed)
            states.append(normed)
            feed = feed if mtp.feed == "target" else output
    return jnp.stack(states)


def _run(
    graph: ModelGraph,
    model: Model,
    module_graph: nnx.GraphDef[MTPModule],
    number: int,
    tokens: Int32[Array, "B S"],
    rows: Rows,
    params: nnx.State,
    feed: Float[Array, "T H"],
) -> tuple[Float[Array, "T H"], Float[Array, "T H"]]:
    """Module `number` over all rows: what the next one is fed with, and what its head takes."""
    mtp = graph.config.mtp
    assert mtp is not None
    (group, _), conv = graph.layout.modules[number].attention, graph.layout.modules[number].conv
    place = Place((group, 0), None if conv is None else (conv[0], 0))
    visit = Visit(rows, rows.real, place, 0, number + 1 if mtp.consumed_position else 0)
    consumed = jnp.pad(tokens[:, number + 1 :], ((0, 0), (0, number + 1)))
    one_layer = tuple(replace(group, num_layers=1) for group in graph.layout.groups)
    pages = _pages(replace(graph.layout, groups=one_layer), rows, feed.dtype)
    module = nnx.merge(module_graph, params)
    with differentiable(), jax.named_scope(f"mtp_{number}"):
        output, normed, _ = run_module(mtp, model, module, consumed.reshape(-1), feed, visit, pages)
    return output, normed
