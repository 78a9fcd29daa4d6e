"""catch_up: one primitive that keeps every module's cache exact and proposes the next drafts.

The window of a request is the positions `[min_m exact[m], computed)`: everything some module does
not hold yet or holds only for rejected drafts. The modules run over these rows in order; each
writes only where `position >= exact[m]` and reads all earlier entries from its cache. The last row
of module m gives draft m+1, which joins the token history as module m+1's input. The same call
serves decode, rejection, chunk boundaries, prefix hits and resumption.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from mmtp_jax.cache.pages import Pages
from mmtp_jax.models.model import Model, ModelGraph
from mmtp_jax.models.mtp import runs
from mmtp_jax.models.rows import Rows

# (logits [B, V], index of the token to choose [B], token history [R, L]) -> token [B]
Choose = Callable[[Array, Array, Array], Array]


class Proposal(NamedTuple):
    """Drafts per request, the history with the drafts appended, the pages, and (scoring) all
    logits.
    """

    drafts: Int32[Array, "B N"]
    tokens: Int32[Array, "R L"]
    pages: Pages
    logits: Float[Array, "N T V"] | None


def catch_up(
    graph: ModelGraph,
    model: Model,
    tokens: Int32[Array, "R L"],
    pages: Pages,
    rows: Rows,
    feed: Float[Array, "T H"],
    slot: Int32[Array, " B"],
    exact: Int32[Array, "B N"],
    length: Int32[Array, " B"],
    drafting: Bool[Array, " B"],
    choose: Choose,
    *,
    collect: bool = False,
    unroll: bool = False,
) -> Proposal:
    """Run all modules over the window rows.

    `feed` holds the target's hidden state of every row, `length` the committed tokens: draft m+1 is
    for index length + m and is written to the history of requests that are `drafting`.
    """
    mtp = graph.config.mtp
    assert mtp is not None and model.mtp is not None
    num_slots = tokens.shape[0]
    row_slot = slot[rows.request]
    last_row = jnp.maximum(rows.cu_q_lens[1:] - 1, 0)
    draft_slot = jnp.where(drafting, slot, num_slots)

    def module_step(run: int, carry: tuple, inputs: tuple) -> tuple[tuple, tuple]:
        tokens, feed, pages = carry
        params, depth, module = inputs
        layer = nnx.merge(graphs[run], params)
        consumed = tokens.at[row_slot, rows.position + 1 + module].get(mode="clip")
        embedded = model.target.embed(consumed)
        if mtp.zero_first_embedding:
            embedded = jnp.where((rows.position == 0)[:, None], 0, embedded)
        write = rows.real & (rows.position >= exact[rows.request, module])
        place = graph.layout.modules[starts[run]]
        pre, post, pages = layer(embedded, feed, rows, write, pages, place, depth)
        head = model.target.logits if layer.head is None else layer.head
        with jax.named_scope("draft"):
            index = length + module
            draft = choose(head(post[last_row]).astype(jnp.float32), index, tokens)
            tokens = tokens.at[draft_slot, index].set(draft, mode="drop")
        if mtp.feed != "target":
            feed = pre if mtp.feed == "chain_pre" else post
        everything = head(post).astype(jnp.float32) if collect else None
        return (tokens, feed, pages), (draft, everything)

    carry = (tokens, feed, pages)
    graphs, starts, outputs = [], [], []
    for run, (first, count) in enumerate(runs(mtp)):
        run_graph, params = nnx.split(model.mtp.runs[run])
        graphs.append(run_graph)
        starts.append(first)
        depth = jnp.arange(count, dtype=jnp.int32)
        with jax.named_scope(f"mtp_{first}_to_{first + count - 1}"):
            carry, output = jax.lax.scan(
                functools.partial(module_step, run),
                carry,
                (params, depth, first + depth),
                unroll=count if unroll else 1,
            )
        outputs.append(output)
    tokens, _, pages = carry
    drafts = jnp.concatenate([draft for draft, _ in outputs]).T
    logits = jnp.concatenate([rows for _, rows in outputs]) if collect else None
    return Proposal(drafts, tokens, pages, logits)
