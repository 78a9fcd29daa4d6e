"""The jitted program of the engine: target forward, verify, catch_up; pure in and out.

Compiled per bucket of T rows only. Requests, page-table width and sampling features multiply
nothing: prompt chunks, decode windows and mixtures of both are the same program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from mmtp_jax.engine.plan import CollectedLogits, LogprobOutput, StepOutput, StepPlan
from mmtp_jax.engine.state import EngineState
from mmtp_jax.models.model import Model, ModelGraph, Params
from mmtp_jax.models.rows import Rows, pack_rows
from mmtp_jax.sampling.sampler import logprobs, sample
from mmtp_jax.sampling.state import SamplingState, params_of
from mmtp_jax.speculative.exactness import advance_exact
from mmtp_jax.speculative.propose import catch_up
from mmtp_jax.speculative.verify import verify

# (logits [S, V], sampling state, slot [S], index [S], history [R, L]) -> token [S]
Chooser = Callable[[Array, SamplingState, Array, Array, Array], Array]


@dataclasses.dataclass(frozen=True)
class StepShape:
    """Static numbers of one program: T rows, W = k+1 columns of emitted tokens, S logit rows."""

    num_rows: int
    width: int
    logit_rows: int
    collect: bool = False
    unroll: bool = False


def _target_rows(
    state: EngineState, plan: StepPlan, tables: tuple[Array, ...], num_rows: int
) -> Rows:
    """Rows this step computes: known tokens first, then as many drafts as the plan, the request's
    limit and its pages allow."""
    computed, length = state.computed[plan.slot], state.length[plan.slot]
    known = jnp.minimum(plan.rows, length - computed)
    room = jnp.minimum(state.drafts[plan.slot], state.limit[plan.slot] - 1 - length)
    drafts = jnp.clip(plan.rows - known, 0, jnp.maximum(room, 0))
    count = jnp.clip(known + drafts, 0, jnp.maximum(plan.capacity - computed, 0))
    count = jnp.where(state.done[plan.slot] | (plan.rows == 0), 0, count)
    return pack_rows(computed, count, tables, num_rows)


def _hidden_at(
    old: Float[Array, "R lag H"],
    new: Float[Array, "T H"],
    slot: Int32[Array, "*X"],
    position: Int32[Array, "*X"],
    computed: Int32[Array, "*X"],
    first_row: Int32[Array, "*X"],
) -> Float[Array, "*X H"]:
    """The target's hidden state at a position: of this step, or one of the last `lag` before it."""
    back = old.shape[1] - (computed - position)
    kept = old.at[slot, jnp.clip(back, 0, old.shape[1] - 1)].get(mode="clip")
    fresh = new.at[first_row + position - computed].get(mode="clip")
    return jnp.where((position >= computed)[..., None], fresh, kept)


def _logprobs(
    logits: Float[Array, "S V"],
    draws: Int32[Array, " S"],
    wanted: Array,
    rows: Int32[Array, "B W"],
) -> LogprobOutput:
    def compute() -> tuple[Array, Array, Array]:
        return logprobs(logits, draws)

    def skip() -> tuple[Array, Array, Array]:
        shapes = jax.eval_shape(compute)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    chosen, top_ids, top_values = jax.lax.cond(wanted, compute, skip)
    return LogprobOutput(chosen[rows], top_ids[rows], top_values[rows])


def step(
    graph: ModelGraph,
    shape: StepShape,
    choose_draft: Chooser,
    params: Params,
    state: EngineState,
    plan: StepPlan,
) -> tuple[EngineState, StepOutput]:
    """One engine step. `state` may be donated: nothing of it is read after it was written.

    `choose_draft` turns a module's logits into a draft (`sample` in production; anything it returns
    leaves the emitted text unchanged).
    """
    model: Model = graph.bind(params)
    config = graph.config
    num_slots = state.length.shape[0]
    slot = plan.slot
    row = jnp.minimum(slot, num_slots - 1)  # padding requests read some slot and write none

    for group, table in enumerate(state.tables):
        at = jnp.where(plan.entries[:, 0] == group, plan.entries[:, 1], num_slots)
        table = table.at[at, plan.entries[:, 2]].set(plan.entries[:, 3], mode="drop")
        tables = (*state.tables[:group], table, *state.tables[group + 1 :])
        state = dataclasses.replace(state, tables=tables)
    step_tables = tuple(table[row] for table in state.tables)

    with jax.named_scope("target"):
        rows = _target_rows(state, plan, step_tables, shape.num_rows)
        count = rows.cu_q_lens[1:] - rows.cu_q_lens[:-1]
        computed, length = state.computed[row], state.length[row]
        inputs = state.tokens.at[slot[rows.request], rows.position].get(mode="clip")
        write = rows.real & (rows.position >= state.target_valid[row][rows.request])
        raw, pages = model.target(inputs, rows, write, state.pages, graph.layout.target)
        normed = model.target.norm(raw)

    with jax.named_scope("verify"):
        num_draws = jnp.where(count > 0, jnp.maximum(computed + count - (length - 1), 0), 0)
        draw_rows = pack_rows(length - 1, num_draws, (), shape.logit_rows)
        owner = draw_rows.request
        source = rows.cu_q_lens[owner] + draw_rows.position - computed[owner]
        logits = model.target.logits(normed.at[source].get(mode="clip"))
        draw_slot = jnp.where(draw_rows.real, slot[owner], num_slots)
        index = draw_rows.position + 1
        drawn = sample(logits, state.sampling, draw_slot, index, state.tokens)
        column = jnp.arange(shape.width, dtype=jnp.int32)
        packed = jnp.minimum(draw_rows.cu_q_lens[:-1, None] + column, shape.logit_rows - 1)
        draws = drawn[packed]
        ahead = length[:, None] + column
        drafted = state.tokens.at[slot[:, None], ahead].get(mode="clip")
        verdict = verify(draws, drafted, num_draws, params_of(state.sampling, slot).stop_ids)
        logprob_output = _logprobs(logits, drawn, plan.logprobs, packed)

        emitted = verdict.num_emitted
        new_length = length + emitted
        new_computed = jnp.where(emitted > 0, new_length - 1, computed + count)
        ended = verdict.stopped | ((emitted > 0) & (new_length >= state.limit[row]))
        write_slot = jnp.where(column < emitted[:, None], slot[:, None], num_slots)
        tokens = state.tokens.at[write_slot, ahead].set(draws, mode="drop")

    exact = state.exact[row]
    hidden = state.hidden
    drafts = jnp.zeros((slot.shape[0], config.num_modules), jnp.int32)
    mtp_rows, mtp_logits = None, None
    drafting = (emitted > 0) & ~ended
    if config.mtp is not None:
        exact = advance_exact(exact, computed, length, jnp.maximum(emitted - 1, 0))
        start = jnp.min(exact, axis=1)
        window = jnp.where(count > 0, jnp.maximum(new_computed - start, 0), 0)
        mtp_rows = pack_rows(start, window, step_tables, shape.num_rows)
        states = raw if config.mtp.target_hidden == "pre" else normed
        owner = mtp_rows.request
        feed = _hidden_at(
            hidden, states, slot[owner], mtp_rows.position, computed[owner], rows.cu_q_lens[owner]
        )
        proposal = catch_up(
            graph,
            model,
            tokens,
            pages,
            mtp_rows,
            feed,
            slot,
            exact,
            new_length,
            drafting,
            lambda logits, index, history: choose_draft(
                logits, state.sampling, jnp.where(drafting, slot, num_slots), index, history
            ),
            collect=shape.collect,
            unroll=shape.unroll,
        )
        drafts, tokens, pages, mtp_logits = proposal
        lag = hidden.shape[1]
        kept = new_computed[:, None] - lag + jnp.arange(lag)
        here = (slot[:, None], kept, computed[:, None], rows.cu_q_lens[:-1, None])
        ring = _hidden_at(hidden, states, *(jnp.broadcast_to(x, kept.shape) for x in here))
        hidden = hidden.at[slot].set(ring, mode="drop")

    collected = None
    if shape.collect:
        collected = _collected(model, normed, rows, mtp_rows, mtp_logits)
    state = dataclasses.replace(
        state,
        tokens=tokens,
        length=state.length.at[slot].set(new_length, mode="drop"),
        computed=state.computed.at[slot].set(new_computed, mode="drop"),
        drafts=state.drafts.at[slot].set(jnp.where(drafting, config.num_modules, 0), mode="drop"),
        done=state.done.at[slot].set(state.done[row] | ended, mode="drop"),
        exact=state.exact.at[slot].set(exact, mode="drop"),
        hidden=hidden,
        pages=pages,
    )
    output = StepOutput(
        tokens=draws,
        count=emitted,
        drafted=jnp.maximum(num_draws - 1, 0),
        done=ended,
        drafts=drafts,
        logprobs=logprob_output,
        collected=collected,
    )
    return state, output


def _collected(
    model: Model,
    normed: Float[Array, "T H"],
    rows: Rows,
    mtp_rows: Rows | None,
    mtp_logits: Float[Array, "N T V"] | None,
) -> CollectedLogits:
    logits = model.target.logits(normed)
    if mtp_rows is None or mtp_logits is None:
        mtp_rows, mtp_logits = rows, jnp.zeros((0, *logits.shape), jnp.float32)
    return CollectedLogits(
        target_request=rows.request,
        target_position=rows.position,
        target_real=rows.real,
        target_logits=logits,
        mtp_request=mtp_rows.request,
        mtp_position=mtp_rows.position,
        mtp_real=mtp_rows.real,
        mtp_logits=mtp_logits,
    )
