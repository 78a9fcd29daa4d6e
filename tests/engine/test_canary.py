"""Right modules are always accepted: through chunking, prefix hits, preemption and concurrency."""

from __future__ import annotations

import functools

from engine.canary import VOCAB, canary, canary_values, counting
from engine.harness import Harness

from mmtp_jax.sampling.params import SamplingParams

DEPTH = 8
LONG = SamplingParams(temperature=0.0, max_tokens=40)


@functools.cache
def engine(order: tuple[int, ...], num_pages: int = 128) -> Harness:
    return Harness(
        canary(DEPTH),
        values=canary_values(list(order)),
        page_size=4,
        num_pages=num_pages,
        max_num_seqs=3,
        max_model_len=96,
        budget=32,
    )


RIGHT = tuple(range(DEPTH))


def fresh(num_pages: int = 128) -> Harness:
    made = engine(RIGHT, num_pages)
    made.reset()
    made.chunk = lambda request, limit: limit
    return made


def assert_all_accepted(made: Harness) -> None:
    drafted = [delta for delta in made.deltas if delta.drafted]
    assert drafted
    for delta in drafted:
        assert delta.accepted == delta.drafted, delta
    assert max(delta.accepted for delta in drafted) == DEPTH


def test_one_request() -> None:
    made = fresh()
    assert made.generate(counting(3, 5), LONG) == counting(8, 40)
    assert_all_accepted(made)


def test_chunked_prompts() -> None:
    for size in (1, 3, 7, 9):
        made = fresh()
        made.chunk = lambda request, limit, size=size: min(size, limit)
        assert made.generate(counting(3, 30), LONG) == counting(33, 40)
        assert_all_accepted(made)


def test_prefix_hits_of_every_length() -> None:
    made = fresh()
    first = counting(1, 26)
    made.generate(first, LONG)
    for shared in range(11, 22):
        # Leaves the count at `shared` and goes on from another token.
        second = first[:shared] + counting((first[shared] + 5) % (VOCAB - 1) + 1, 6)
        made.deltas.clear()
        made.generate(second, LONG)
        assert_all_accepted(made)


def test_concurrent_requests() -> None:
    made = fresh()
    for start in range(1, 9):
        made.add(counting(start, 2 + 3 * start), LONG)
    made.run()
    assert_all_accepted(made)


def test_preempted_requests() -> None:
    made = fresh(num_pages=48)
    for start in range(1, 7):
        made.add(counting(start, 20 + start), SamplingParams(temperature=0.0, max_tokens=60))
    made.run()
    assert made.core.scheduler.num_preemptions > 0
    assert_all_accepted(made)


def test_permuted_modules_are_rejected() -> None:
    made = engine((1, 0, 2, 3, 4, 6, 5, 7))
    made.reset()
    made.generate(counting(3, 5), LONG)
    drafted = sum(delta.drafted for delta in made.deltas)
    accepted = sum(delta.accepted for delta in made.deltas)
    assert accepted < drafted / 2
    rates = made.core.stats.acceptance.rates
    assert rates[0] == 0.0
