"""What steps are told and answer, packed and unpacked, and the counts made of it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtp_jax.engine.buckets import Bucket
from mmtp_jax.engine.plan import HostOutput, StepOutput, StepPlan
from mmtp_jax.engine.request import Request, ScheduledRequest
from mmtp_jax.engine.stats import Acceptance

NUM_SLOTS = 5
BUCKET = Bucket(num_drafts=2, num_rows=16, num_requests=4, logit_rows=16, num_entries=6)


def scheduled(slot: int, entries: tuple[tuple[tuple[int, int], ...], ...]) -> ScheduledRequest:
    request = Request.create("name", [1], None, 8)
    return ScheduledRequest(request, 0, slot, slot + 1, slot // 2, False, True, 16 * slot, entries)


def test_a_plan_is_padded_with_a_slot_that_is_none() -> None:
    plan = StepPlan.pack(BUCKET, NUM_SLOTS, [scheduled(3, (((0, 9),), ())), scheduled(0, ())])
    assert plan.slot.tolist() == [3, 0, NUM_SLOTS, NUM_SLOTS]
    assert plan.rows.tolist() == [4, 1, 0, 0]
    assert plan.drafts.tolist() == [1, 0, 0, 0]
    assert plan.capacity.tolist() == [48, 0, 0, 0]
    assert plan.entries.shape == (6, 4) and plan.packed.dtype == np.int32
    assert plan.packed.shape == (4 * 4 + 4 * 6,)
    assert plan.entries[0].tolist() == [0, 3, 0, 9]
    assert (plan.entries[1:, 1] == NUM_SLOTS).all()


def test_entries_of_a_plan_are_those_of_all_groups() -> None:
    rows = [scheduled(2, (((0, 7), (1, 8)), ((0, 5),))), scheduled(1, ((), ((4, 6),)))]
    entries = StepPlan.pack(BUCKET, NUM_SLOTS, rows).entries[:4].tolist()
    assert entries == [[0, 2, 0, 7], [0, 2, 1, 8], [1, 2, 0, 5], [1, 1, 4, 6]]


def test_more_entries_than_the_program_takes_are_refused() -> None:
    pages = tuple((column, 1) for column in range(7))
    with pytest.raises(ValueError):
        StepPlan.pack(BUCKET, NUM_SLOTS, [scheduled(1, (pages,))])


@pytest.mark.parametrize("width", [1, 2, 9])
def test_an_output_is_unpacked_as_it_was_packed(width: int) -> None:
    count = [0, 1, width]
    tokens = np.arange(3 * width).reshape(3, width) + 100
    drafts = np.arange(3 * (width - 1)).reshape(3, width - 1) + 500
    output = StepOutput.pack(
        count=jnp.array(count),
        drafted=jnp.array([0, 0, width - 1]),
        done=jnp.array([False, True, False]),
        first_row=jnp.array([0, 4, 5]),
        first_position=jnp.array([7, 8, 9]),
        tokens=jnp.array(tokens),
        drafts=jnp.array(drafts, jnp.int32),
        collected=None,
    )
    assert output.packed.dtype == jnp.int32
    for size in (3, 1):
        found = output.unpack(size)
        assert (
            found[:-1]
            == HostOutput(
                emitted=count[:size],
                drafted=[0, 0, width - 1][:size],
                done=[0, 1, 0][:size],
                first_row=[0, 4, 5][:size],
                first_position=[7, 8, 9][:size],
                tokens=tokens[:size].tolist(),
                drafts=drafts,
            )[:-1]
        )
        assert np.array_equal(found.drafts, drafts[:size])


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4))))
def test_acceptance_counts_every_position(verified: list[tuple[int, int]]) -> None:
    acceptance = Acceptance(4)
    for drafted, accepted in verified:
        acceptance.count(drafted, accepted)
    for place in range(4):
        drafted_here = [pair for pair in verified if pair[0] > place]
        assert acceptance.drafted[place] == len(drafted_here)
        assert acceptance.accepted[place] == sum(accepted > place for _, accepted in drafted_here)
