"""catch_up: one primitive that keeps every module's cache exact and proposes the next drafts.

The window of a request is the positions `[min_m exact[m], computed)` over the modules m that run
for it: everything one of them does not hold yet or holds only for rejected drafts. The modules run
over these rows in order; each writes only where `position >= exact[m]` and reads all earlier
entries from its cache. The last row of module m gives draft m+1, which joins the token history as
module m+1's input. The same call serves decode, rejection, chunk boundaries, prefix hits,
resumption, and modules that were left out of some steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int32

from mmtp_jax.cache.pages import Pages
from mmtp_jax.models.model import Model, ModelGraph
from mmtp_jax.models.mtp import runs
from mmtp_jax.models.visit import Visit
from mmtp_jax.speculative.module import Choose, Proposal, Window, module_logits, run_module


def catch_up(
    graph: ModelGraph,
    model: Model,
    tokens: Int32[Array, "R L"],
    pages: Pages,
    window: Window,
    choose: Choose,
    *,
    drafts: int,
    collect: bool = False,
    unroll: bool = False,
) -> Proposal:
    """Run the first modules, as many as `drafts` needs, over the window rows; a draft from each."""
    mtp = graph.config.mtp
    assert mtp is not None and model.mtp is not None
    rows, num_slots = window.rows, tokens.shape[0]
    row_slot = window.slot[rows.request]
    last_row = jnp.maximum(rows.cu_q_lens[1:] - 1, 0)

    def module_step(run: int, carry: tuple, inputs: tuple) -> tuple[tuple, tuple]:
        tokens, feed, pages = carry
        params, depth, number = inputs
        module = nnx.merge(graphs[run], params)
        consumed = tokens.at[row_slot, rows.position + 1 + number].get(mode="clip")
        write = rows.real & (rows.position >= window.exact[rows.request, number])
        write &= number < window.modules[rows.request]
        ahead = number + 1 if mtp.consumed_position else 0
        visit = Visit(rows, write, graph.layout.modules[starts[run]], depth, ahead)
        output, normed, pages = run_module(mtp, model, module, consumed, feed, visit, pages)
        index = window.length + number
        chosen_from = module_logits(model, module, normed[last_row])
        draft_slot = jnp.where(number < window.drafts, window.slot, num_slots)
        with jax.named_scope("sample"):
            draft = choose(chosen_from, draft_slot, index, tokens)
            tokens = tokens.at[draft_slot, index].set(draft, mode="drop")
        everything = module_logits(model, module, normed) if collect else None
        feed = feed if mtp.feed == "target" else output
        return (tokens, feed, pages), (draft, output[last_row], everything)

    carry = (tokens, window.feed, pages)
    graphs, starts, outputs = [], [], []
    for run, (first, count) in enumerate(runs(mtp)):
        if first >= drafts:
            break
        run_graph, params = nnx.split(model.mtp.runs[run])
        graphs.append(run_graph)
        starts.append(first)
        step = functools.partial(module_step, run)
        carry, output = _over_depths(step, carry, params, first, min(count, drafts - first), unroll)
        outputs.append(output)
    tokens, _, pages = carry
    proposed, last, logits = zip(*outputs, strict=True)
    return Proposal(
        jnp.concatenate(proposed).T,
        tokens,
        pages,
        last[-1][-1],
        jnp.concatenate(logits) if collect else None,
    )


def _over_depths(
    step: Callable[[tuple, tuple], tuple[tuple, tuple]],
    carry: tuple,
    params: nnx.State,
    first: int,
    count: int,
    unroll: bool,
) -> tuple[tuple, tuple]:
    """Scan `count` modules from `first` on, the first of those whose parameters are stacked.

    Unrolled (but traced once) for GPUs, where a loop would be driven by the host; every depth has a
    name of its own in profiles.
    """
    if not unroll:
        depths = jnp.arange(count, dtype=jnp.int32)
        params = jax.tree.map(lambda leaf: leaf[:count], params)
        with jax.named_scope(f"mtp_{first}_to_{first + count - 1}"):
            return jax.lax.scan(step, carry, (params, depths, first + depths))
    outputs, step = [], jax.jit(step)
    for depth in range(count):
        own = jax.tree.map(lambda leaf, depth=depth: leaf[depth], params)
        with jax.named_scope(f"mtp_{first + depth}"):
            carry, output = step(carry, (own, jnp.int32(depth), jnp.int32(first + depth)))
        outputs.append(output)
    return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)
