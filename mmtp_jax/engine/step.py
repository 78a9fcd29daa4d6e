"""The jitted program of the engine: target forward, verify, catch_up; pure in and out.

Compiled per bucket of T rows and, where draft lengths vary, per number D of modules that run.
Requests, page-table width and sampling features multiply nothing: prompt chunks, decode windows and
mixtures of both are the same program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from mmtp_jax.engine.collect import all_logits
from mmtp_jax.engine.draw import draw
from mmtp_jax.engine.plan import StepOutput, StepPlan
from mmtp_jax.engine.state import EngineState, Numbers
from mmtp_jax.models.model import Model, ModelGraph, Params
from mmtp_jax.models.rows import Rows, pack_rows
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
    """Static numbers of one program: T rows, D drafts of a request at most, W columns of emitted
    tokens, S logit rows."""

    num_rows: int
    num_drafts: int
    width: int
    logit_rows: int
    collect: bool = False
    unroll: bool = False


class _Requests(NamedTuple):
    """The B requests at the start of a step. Padding has slot R: it reads the last slot's values
    (`row`) and writes nothing."""

    slot: Int32[Array, " B"]
    row: Int32[Array, " B"]
    numbers: Numbers
    tables: tuple[Int32[Array, "B MP"], ...]


class _Emission(NamedTuple):
    """What verification decided: the first `num_emitted` columns of `tokens` are emitted.

    `targets` are the tokens drawn from the step's rows, or after them where none was drawn.
    """

    tokens: Int32[Array, "B W"]
    num_emitted: Int32[Array, " B"]
    ended: Bool[Array, " B"]
    num_draws: Int32[Array, " B"]
    targets: Int32[Array, " T"]

    @property
    def goes_on(self) -> Bool[Array, " B"]:
        """Whether a request emitted and wants drafts."""
        return (self.num_emitted > 0) & ~self.ended


def _enter_pages(state: EngineState, plan: StepPlan) -> EngineState:
    """Write the plan's new page-table entries."""
    group, slot, column, page = plan.entries.T
    unused = state.num_slots
    tables = tuple(
        table.at[jnp.where(group == index, slot, unused), column].set(page, mode="drop")
        for index, table in enumerate(state.tables)
    )
    return dataclasses.replace(state, tables=tables)


def _requests(state: EngineState, plan: StepPlan) -> _Requests:
    row = jnp.minimum(plan.slot, state.num_slots - 1)
    return _Requests(
        slot=plan.slot,
        row=row,
        numbers=Numbers.unpack(state.numbers[row]),
        tables=tuple(table[row] for table in state.tables),
    )


def _target_rows(plan: StepPlan, requests: _Requests, num_rows: int) -> Rows:
    """Rows this step computes: known tokens first, then as many drafts as the plan, the request's
    limit and its pages allow."""
    numbers = requests.numbers
    known = jnp.minimum(plan.rows, numbers.length - numbers.computed)
    room = jnp.minimum(numbers.drafts, numbers.limit - 1 - numbers.length)
    drafts = jnp.clip(plan.rows - known, 0, jnp.maximum(room, 0))
    count = jnp.clip(known + drafts, 0, jnp.maximum(plan.capacity - numbers.computed, 0))
    count = jnp.where((numbers.done != 0) | (plan.rows == 0), 0, count)
    return pack_rows(numbers.computed, count, requests.tables, num_rows)


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
    requests: _Requests,
    rows: Rows,
    normed: Float[Array, "T H"],
) -> _Emission:
    """Draw the target's token at every index from `length` on that this step reached, and
    verify.
    """
    slot, (length, computed, limit, *_) = requests.slot, requests.numbers
    count = _count(rows)
    reached = computed + count - (length - 1)
    num_draws = jnp.where(count > 0, jnp.maximum(reached, 0), 0)
    draw_rows = pack_rows(length - 1, num_draws, (), shape.logit_rows)
    owner = draw_rows.request
    source = rows.cu_q_lens[owner] + draw_rows.position - computed[owner]
    drawn = draw(
        model.target,
        normed.at[source].get(mode="clip"),
        state.sampling,
        jnp.where(draw_rows.real, slot[owner], state.num_slots),
        draw_rows.position + 1,
        state.tokens,
    )

    following = state.tokens.at[slot[rows.request], rows.position + 1].get(mode="clip")
    drawn_from = jnp.where(draw_rows.real, source, shape.num_rows)
    column = jnp.arange(shape.width, dtype=jnp.int32)
    packed = jnp.minimum(draw_rows.cu_q_lens[:-1, None] + column, shape.logit_rows - 1)
    drafted = state.tokens.at[slot[:, None], length[:, None] + column].get(mode="clip")
    stop_ids = params_of(state.sampling, slot).stop_ids
    verdict = verify(drawn[packed], drafted, num_draws, stop_ids)
    full = length + verdict.num_emitted >= limit
    return _Emission(
        tokens=drawn[packed],
        num_emitted=verdict.num_emitted,
        ended=verdict.stopped | ((verdict.num_emitted > 0) & full),
        num_draws=num_draws,
        targets=following.at[drawn_from].set(drawn, mode="drop"),
    )


def _advance(
    requests: _Requests, rows: Rows, emission: _Emission, drafts: Int32[Array, " B"]
) -> Numbers:
    """The requests' numbers after a step that proposes `drafts`. A request that sampled has
    computed all tokens but the newest."""
    before, emitted, count = requests.numbers, emission.num_emitted, _count(rows)
    length = before.length + emitted
    return before._replace(
        length=length,
        computed=jnp.where(emitted > 0, length - 1, before.computed + count),
        drafts=jnp.where(emission.goes_on, drafts, 0),
        ran=jnp.where(count > 0, drafts, before.ran),
        done=before.done | emission.ended,
    )


def _commit(
    state: EngineState, requests: _Requests, emission: _Emission, numbers: Numbers
) -> EngineState:
    """Append the emitted tokens and take over the new `numbers`."""
    slot, emitted = requests.slot, emission.num_emitted
    column = jnp.arange(emission.tokens.shape[1], dtype=jnp.int32)
    emitting = jnp.where(column < emitted[:, None], slot[:, None], state.num_slots)
    ahead = requests.numbers.length[:, None] + column
    return dataclasses.replace(
        state,
        tokens=state.tokens.at[emitting, ahead].set(emission.tokens, mode="drop"),
        numbers=state.numbers.at[slot].set(numbers.pack(), mode="drop"),
        row_targets=state.row_targets.at[: emission.targets.shape[0]].set(emission.targets),
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
    numbers: Numbers,
    states: Float[Array, "T H"],
    plan: StepPlan,
) -> tuple[EngineState, Proposal | None, Rows]:
    """Bring the modules that run for a request up to `computed`, and draft where it goes on.

    `state` is committed, `requests` and `rows` are from before, `numbers` from after it; `states`
    are the rows' hidden states that the modules are fed with.
    """
    mtp = graph.config.mtp
    assert mtp is not None
    slot, before, computed = requests.slot, requests.numbers, numbers.computed
    accepted = jnp.maximum(emission.num_emitted - 1, 0)
    exact = advance_exact(
        state.exact[requests.row], before.computed, before.length, accepted, before.ran
    )
    num_modules = exact.shape[1]
    modules = jnp.minimum(plan.drafts, num_modules)
    runs = jnp.arange(num_modules) < modules[:, None]
    start = jnp.min(jnp.where(runs, exact, computed[:, None]), axis=1)
    behind = jnp.where(_count(rows) > 0, jnp.maximum(computed - start, 0), 0)
    window = pack_rows(start, behind, requests.tables, shape.num_rows)
    # Masks are for the indices just verified; beyond the newest token they would be stale.
    sampling = without_masks(state.sampling)

    def hidden_at(request: Int32[Array, "*X"], position: Int32[Array, "*X"]) -> Array:
        first = rows.cu_q_lens[request]
        old = before.computed[request]
        return _hidden_at(state.hidden, states, slot[request], position, old, first)

    proposal = None
    if shape.num_drafts > 0:
        propose = catch_up if mtp.repeats == 1 else repeat_module
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
                length=numbers.length,
                modules=modules,
                drafts=jnp.where(emission.goes_on, plan.drafts, 0),
                capacity=plan.capacity,
            ),
            lambda logits, slot, index, history: choose_draft(
                logits, sampling, slot, index, history
            ),
            drafts=shape.num_drafts,
            collect=shape.collect,
            unroll=shape.unroll,
        )
        state = dataclasses.replace(state, tokens=proposal.tokens, pages=proposal.pages)
    lag = state.hidden.shape[1]
    kept = computed[:, None] - lag + jnp.arange(lag)
    owner = jnp.broadcast_to(jnp.arange(slot.shape[0])[:, None], kept.shape)
    state = dataclasses.replace(
        state,
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
        rows = _target_rows(plan, requests, shape.num_rows)
        inputs = state.tokens.at[plan.slot[rows.request], rows.position].get(mode="clip")
        valid = requests.numbers.target_valid[rows.request]
        write = rows.real & (rows.position >= valid)
        raw, pages = model.target(inputs, rows, write, state.pages, graph.layout.target)
        normed = model.target.norm(raw)
        state = dataclasses.replace(
            state,
            pages=pages,
            row_states=state.row_states.at[: shape.num_rows].set(normed),
        )
    with jax.named_scope("verify"):
        emission = _emit(model, shape, state, requests, rows, normed)
        numbers = _advance(requests, rows, emission, plan.drafts)
        state = _commit(state, requests, emission, numbers)
    proposal, window = None, None
    drafts = jnp.zeros((plan.slot.shape[0], shape.width - 1), jnp.int32)
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
            numbers,
            states,
            plan,
        )
    if proposal is not None:
        drafts = drafts.at[:, : shape.num_drafts].set(proposal.drafts)
    output = StepOutput.pack(
        count=emission.num_emitted,
        drafted=jnp.maximum(emission.num_draws - 1, 0),
        done=emission.ended,
        first_row=rows.cu_q_lens[:-1],
        first_position=requests.numbers.computed,
        tokens=emission.tokens,
        drafts=drafts,
        collected=all_logits(model, normed, rows, window, proposal) if shape.collect else None,
    )
    return state, output
