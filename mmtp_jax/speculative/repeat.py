"""A lone module that drafts several tokens: applied again and again to its own output.

The first draft is `catch_up`'s. For draft j+1 the module takes one more row per request, at the
position after its last, with draft j as token and its own previous output instead of a hidden state
of the target (EAGLE, arXiv 2401.15077; checkpoints such as DeepSeek-V3 ship one module). Those rows
lie beyond what the target has computed: they are never final, and the next window writes the same
positions anew.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int32

from mmtp_jax.cache.pages import Pages
from mmtp_jax.models.model import Model, ModelGraph
from mmtp_jax.models.rows import pack_rows
from mmtp_jax.models.visit import Visit
from mmtp_jax.speculative.module import Choose, Proposal, Window, module_logits, run_module
from mmtp_jax.speculative.propose import catch_up


def repeat_module(
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
    """All drafts from the only module. Same arguments as `catch_up`."""
    mtp = graph.config.mtp
    assert mtp is not None and model.mtp is not None
    first = catch_up(
        graph, model, tokens, pages, window, choose, drafts=1, collect=collect, unroll=unroll
    )
    run_graph, params = nnx.split(model.mtp.runs[0])
    module = nnx.merge(run_graph, jax.tree.map(lambda leaf: leaf[0], params))
    num_slots, num_requests = tokens.shape[0], window.slot.shape[0]
    newest = window.rows.kv_lens - 1  # the position of the first draft's row

    def draft_next(carry: tuple, number: Int32[Array, ""]) -> tuple[tuple, Array]:
        tokens, feed, pages = carry
        drafting = number < window.drafts
        count = drafting.astype(jnp.int32)
        rows = pack_rows(newest + number, count, window.rows.tables, num_requests)
        consumed = tokens.at[window.slot[rows.request], rows.position + 1].get(mode="clip")
        write = rows.real & (rows.position < window.capacity[rows.request])
        place = graph.layout.modules[0]
        visit = Visit(rows, write, place, ahead=1 if mtp.consumed_position else 0)
        output, normed, pages = run_module(
            mtp, model, module, consumed, feed[rows.request], visit, pages
        )
        row = jnp.maximum(rows.cu_q_lens[1:] - 1, 0)
        index = window.length + number
        draft_slot = jnp.where(drafting, window.slot, num_slots)
        with jax.named_scope("draft"):
            draft = choose(module_logits(model, module, normed[row]), draft_slot, index, tokens)
            tokens = tokens.at[draft_slot, index].set(draft, mode="drop")
        return (tokens, output[row], pages), draft

    with jax.named_scope("mtp_repeats"):
        carry, others = jax.lax.scan(
            draft_next,
            (first.tokens, first.output, first.pages),
            jnp.arange(1, drafts, dtype=jnp.int32),
            unroll=max(drafts - 1, 1) if unroll else 1,
        )
    tokens, output, pages = carry
    proposed = jnp.concatenate([first.drafts, others.T], axis=1)
    return Proposal(proposed, tokens, pages, output, first.logits)
