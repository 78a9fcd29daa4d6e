"""The jitted program of the engine: target forward, verify, catch_up; pure in and out.

Compiled per bucket of T rows only. Requests, page-table width and sampling features multiply
nothing: prompt chunks, decode windows and mixtures of both are the same program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from mmtp_jax.engine.collect import all_logits
from mmtp_jax.engine.logprobs import emitted_logprobs
from mmtp_jax.engine.plan import LogprobOutput, StepOutput, StepPlan
from mmtp_jax.engine.state import EngineState
from mmtp_jax.models.model import Model, ModelGraph, Params
from mmtp_jax.models.rows import Rows, pack_rows
from mmtp_jax.sampling.sampler import sample
from mmtp_jax.sampling.state import SamplingState, params_of, without_masks
from mmtp_jax.speculative.exactness import advance_exact
from mmtp_jax.speculative.module import Proposal, Window
from mmtp_jax.speculative.propose import catch_up
from mmtp_jax.speculative.repeat import repeat_module
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


class _Requests(NamedTuple):
    """The B requests at the start of a step. Padding has slot R: it reads the last slot's values
    (`row`) and writes nothing."""

    slot: Int32[Array, " B"]
    row: Int32[Array, " B"]
    computed: Int32[Array, " B"]
    length: Int32[Array, " B"]
    tables: tuple[Int32[Array, "B MP"], ...]


class _Emission(NamedTuple):
    """What verification decided: the first `num_emitted` columns of `tokens` are emitted."""

    tokens: Int32[Array, "B W"]
    num_emitted: Int32[Array, " B"]
    ended: Bool[Array, " B"]
    num_draws: Int32[Array, " B"]
    logprobs: LogprobOutput


def _enter_pages(state: EngineState, plan: StepPlan) -> EngineState:
    """Write the plan's new page-table entries."""
    group, slot, column, page = plan.entries.T
    unused = state.length.shape[0]
    tables = tuple(
        table.at[jnp.where(group == index, slot, unused), column].set(page, mode="drop")
        for index, table in enumerate(state.tables)
    )
    return dataclasses.replace(state, tables=tables)


def _requests(state: EngineState, plan: StepPlan) -> _Requests:
    row = jnp.minimum(plan.slot, state.length.shape[0] - 1)
    return _Requests(
        slot=plan.slot,
        row=row,
        computed=state.computed[row],
        length=state.length[row],
        tables=tuple(table[row] for table in state.tables),
    )


def _target_rows(state: EngineState, plan: StepPlan, requests: _Requests, num_rows: int) -> Rows:
    """Rows this step computes: known tokens first, then as many drafts as the plan, the request's
    limit and its pages allow."""
    row, computed, length = requests.row, requests.computed, requests.length
    known = jnp.minimum(plan.rows, length - computed)
    room = jnp.minimum(state.drafts[row], state.limit[row] - 1 - length)
    drafts = jnp.clip(plan.rows - known, 0, jnp.maximum(room, 0))
    count = jnp.clip(known + drafts, 0, jnp.maximum(plan.capacity - computed, 0))
    count = jnp.where(state.done[row] | (plan.rows == 0), 0, count)
    return pack_rows(computed, count, requests.tables, num_rows)


def _count(rows: Rows) -> Int32[Array, " B"]:
    """Target rows of each request."""
    return rows.cu_q_lens[1:] - rows.cu_q_lens[:-1]


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


def _emit(
    model: Model,
    shape: StepShape,
    state: EngineState,
    plan: StepPlan,
    requests: _Requests,
    rows: Rows,
    normed: Float[Array, "T H"],
) -> _Emission:
    """Draw the target's token at every index from `length` on that this step reached, and
    verify.
    """
    slot, length, num_slots = requests.slot, requests.length, state.length.shape[0]
    count = _count(rows)
    reached = requests.computed + count - (length - 1)
    num_draws = jnp.where(count > 0, jnp.maximum(reached, 0), 0)
    draw_rows = pack_rows(length - 1, num_draws, (), shape.logit_rows)
    owner = draw_rows.request
    source = rows.cu_q_lens[owner] + draw_rows.position - requests.computed[owner]
    logits = model.target.logits(normed.at[source].get(mode="clip"))
    draw_slot = jnp.where(draw_rows.real, slot[owner], num_slots)
    drawn = sample(logits, state.sampling, draw_slot, draw_rows.position + 1, state.tokens)

    column = jnp.arange(shape.width, dtype=jnp.int32)
    packed = jnp.minimum(draw_rows.cu_q_lens[:-1, None] + column, shape.logit_rows - 1)
    drafted = state.tokens.at[slot[:, None], length[:, None] + column].get(mode="clip")
    stop_ids = params_of(state.sampling, slot).stop_ids
    verdict = verify(drawn[packed], drafted, num_draws, stop_ids)
    full = length + verdict.num_emitted >= state.limit[requests.row]
    return _Emission(
        tokens=drawn[packed],
        num_emitted=verdict.num_emitted,
        ended=verdict.stopped | ((verdict.num_emitted > 0) & full),
        num_draws=num_draws,
        logprobs=emitted_logprobs(logits, drawn, plan.logprobs, packed),
    )


def _commit(
    state: EngineState, requests: _Requests, rows: Rows, emission: _Emission
) -> EngineState:
    """Append the emitted tokens. A request that sampled has computed all tokens but the newest."""
    slot, emitted = requests.slot, emission.num_emitted
    column = jnp.arange(emission.tokens.shape[1], dtype=jnp.int32)
    emitting = jnp.where(column < emitted[:, None], slot[:, None], state.length.shape[0])
    ahead = requests.length[:, None] + column
    length = requests.length + emitted
    computed = jnp.where(emitted > 0, length - 1, requests.computed + _count(rows))
    done = state.done[requests.row] | emission.ended
    return dataclasses.replace(
        state,
        tokens=state.tokens.at[emitting, ahead].set(emission.tokens, mode="drop"),
        length=state.length.at[slot].set(length, mode="drop"),
        computed=state.computed.at[slot].set(computed, mode="drop"),
        done=state.done.at[slot].set(done, mode="drop"),
    )


def _propose(
    graph: ModelGraph,
    shape: StepShape,
    choose_draft: Chooser,
    model: Model,
    state: EngineState,
    requests: _Requests,
    rows: Rows,
    emission: _Emission,
    states: Float[Array, "T H"],
    capacity: Int32[Array, " B"],
) -> tuple[EngineState, Proposal, Rows]:
    """Bring every module up to `computed` and draft for the requests that go on.

    `state` is committed, `requests` and `rows` are from before, `states` are the rows' hidden
    states that the modules are fed with, `capacity` the positions that have pages.
    """
    slot, row, num_slots = requests.slot, requests.row, state.length.shape[0]
    computed, length = state.computed[row], state.length[row]
    accepted = jnp.maximum(emission.num_emitted - 1, 0)
    exact = advance_exact(state.exact[row], requests.computed, requests.length, accepted)
    start = jnp.min(exact, axis=1)
    behind = jnp.where(_count(rows) > 0, jnp.maximum(computed - start, 0), 0)
    window = pack_rows(start, behind, requests.tables, shape.num_rows)
    drafting = (emission.num_emitted > 0) & ~emission.ended
    # Masks are for the indices just verified; beyond the newest token they would be stale.
    sampling = without_masks(state.sampling)
    draft_slot = jnp.where(drafting, slot, num_slots)

    def hidden_at(request: Int32[Array, "*X"], position: Int32[Array, "*X"]) -> Array:
        first = rows.cu_q_lens[request]
        old = requests.computed[request]
        return _hidden_at(state.hidden, states, slot[request], position, old, first)

    assert graph.config.mtp is not None
    propose = catch_up if graph.config.mtp.repeats == 1 else repeat_module
    proposal = propose(
        graph,
        model,
        state.tokens,
        state.pages,
        Window(
            rows=window,
            feed=hidden_at(window.request, window.position),
            slot=slot,
            exact=exact,
            length=length,
            drafting=drafting,
            capacity=capacity,
        ),
        lambda logits, index, history: choose_draft(logits, sampling, draft_slot, index, history),
        collect=shape.collect,
        unroll=shape.unroll,
    )
    lag = state.hidden.shape[1]
    kept = computed[:, None] - lag + jnp.arange(lag)
    owner = jnp.broadcast_to(jnp.arange(slot.shape[0])[:, None], kept.shape)
    held = jnp.where(drafting, graph.config.num_drafts, 0)
    state = dataclasses.replace(
        state,
        tokens=proposal.tokens,
        pages=proposal.pages,
        drafts=state.drafts.at[slot].set(held, mode="drop"),
        exact=state.exact.at[slot].set(exact, mode="drop"),
        hidden=state.hidden.at[slot].set(hidden_at(owner, kept), mode="drop"),
    )
    return state, proposal, window


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
    mtp = graph.config.mtp
    state = _enter_pages(state, plan)
    requests = _requests(state, plan)
    with jax.named_scope("target"):
        rows = _target_rows(state, plan, requests, shape.num_rows)
        inputs = state.tokens.at[plan.slot[rows.request], rows.position].get(mode="clip")
        valid = state.target_valid[requests.row][rows.request]
        write = rows.real & (rows.position >= valid)
        following = state.tokens.at[plan.slot[rows.request], rows.position + 1].get(mode="clip")
        raw, pages = model.target(inputs, rows, write, state.pages, graph.layout.target)
        normed = model.target.norm(raw)
        state = dataclasses.replace(
            state,
            pages=pages,
            row_states=state.row_states.at[: shape.num_rows].set(normed),
            row_targets=state.row_targets.at[: shape.num_rows].set(following),
        )
    with jax.named_scope("verify"):
        emission = _emit(model, shape, state, plan, requests, rows, normed)
        state = _commit(state, requests, rows, emission)
    proposal, window = None, None
    if mtp is not None:
        states = raw if mtp.target_hidden == "pre" else normed
        state, proposal, window = _propose(
            graph,
            shape,
            choose_draft,
            model,
            state,
            requests,
            rows,
            emission,
            states,
            plan.capacity,
        )
    no_drafts = jnp.zeros((plan.slot.shape[0], 0), jnp.int32)
    output = StepOutput(
        tokens=emission.tokens,
        count=emission.num_emitted,
        drafted=jnp.maximum(emission.num_draws - 1, 0),
        done=emission.ended,
        drafts=no_drafts if proposal is None else proposal.drafts,
        logprobs=emission.logprobs,
        first_row=rows.cu_q_lens[:-1],
        first_position=requests.computed,
        collected=all_logits(model, normed, rows, window, proposal) if shape.collect else None,
    )
    return state, output
