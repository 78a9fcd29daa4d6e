"""Every module's cache entry and every draft equals a teacher-forced recomputation, whatever
happened.

Invariants 1-10 of the exactness rules: any accepted count and any k <= N in any step, prompts of
1..N+2 tokens, any chunking, neighbours, slot reuse, prefix hits, preemption, NaN in free pages.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from engine.harness import Harness
from engine.models import VOCAB, chain, chain_pre, hybrid, plain, target_fed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmtp_jax.sampling.params import SamplingParams

MODELS = {
    "chain-1": lambda: chain(1),
    "chain-3": lambda: chain(3),
    "chain-pre-2": lambda: chain_pre(2),
    "target-fed-4": lambda: target_fed(4),
    "hybrid-2": hybrid,
    "plain": plain,
}


@functools.cache
def harness(name: str, scripted: bool, page_size: int = 4, num_pages: int = 64) -> Harness:
    return Harness(MODELS[name](), scripted=scripted, page_size=page_size, num_pages=num_pages)


def fresh(name: str, scripted: bool, page_size: int = 4, num_pages: int = 64) -> Harness:
    made = harness(name, scripted, page_size, num_pages)
    made.reset()
    made.chunk = lambda request, limit: limit
    made.drafts = None
    return made


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, VOCAB, length).tolist()


@pytest.mark.parametrize("name", MODELS)
def test_prompts_of_any_length_decode_like_the_oracle(name: str) -> None:
    engine = fresh(name, scripted=False)
    for length in range(1, engine.model.num_modules + 5):
        ids = prompt(length)
        assert engine.generate(ids) == list(engine.text(ids, 8))


WITH_MODULES = [name for name in MODELS if name != "plain"]


@pytest.mark.parametrize("name", WITH_MODULES)
@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_history_of_accepted_and_verified_counts(name: str, data: st.DataObject) -> None:
    check_random_history(name, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_MODULES)
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_many_histories(name: str, data: st.DataObject) -> None:
    check_random_history(name, data)


def check_random_history(name: str, data: st.DataObject) -> None:
    """A script forces where drafts are wrong; k, chunks and arrivals vary from step to step."""
    engine = fresh(name, scripted=True, page_size=data.draw(st.sampled_from([2, 4, 16])))
    count = engine.model.num_modules
    # Drawing inside the scheduler could end the example in the middle of a decision.
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    engine.drafts = lambda request: int(rng.integers(0, count + 1))
    engine.chunk = lambda request, limit: int(rng.integers(1, limit + 1))
    expected = {}
    for seed in range(data.draw(st.integers(1, 4))):
        ids = prompt(data.draw(st.integers(1, 14)), seed)
        max_tokens = data.draw(st.integers(1, 16))
        wrong = data.draw(st.sets(st.integers(0, 32), max_size=16))
        if any(script.prompt == tuple(ids) for script in engine.scripts):
            continue
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        expected[engine.add(ids, params, sorted(wrong))] = list(engine.text(ids, max_tokens))
        for _ in range(data.draw(st.integers(0, 3))):
            engine.step()
    engine.run()
    assert {request: engine.output[request] for request in expected} == expected


@pytest.mark.parametrize("name", ["chain-3", "hybrid-2", "target-fed-4"])
@pytest.mark.parametrize("chunk", ["1", "3", "N-1", "N", "N+1", "page-1", "page+1"])
def test_any_chunk_size(name: str, chunk: str) -> None:
    engine = fresh(name, scripted=False)
    count, page = engine.model.num_modules, engine.page_size
    size = {"N-1": count - 1, "N": count, "N+1": count + 1, "page-1": page - 1, "page+1": page + 1}
    rows = max(size.get(chunk) or int(chunk if chunk.isdigit() else 1), 1)
    engine.chunk = lambda request, limit: min(rows, limit)
    first = engine.add(prompt(17))
    second = engine.add(prompt(11, seed=1))
    engine.run()
    assert engine.output[first] == list(engine.text(prompt(17), 8))
    assert engine.output[second] == list(engine.text(prompt(11, seed=1), 8))


@pytest.mark.parametrize("page_size", [2, 4])
@pytest.mark.parametrize("name", ["chain-1", "chain-3", "chain-pre-2", "target-fed-4", "hybrid-2"])
def test_prefix_hits_equal_cold_prefill(name: str, page_size: int) -> None:
    """Shared lengths E-1 .. E+N+1 around a page end, pages smaller than N included."""
    engine = fresh(name, scripted=False, page_size=page_size)
    end = 8
    first = prompt(20)
    for shared in range(end - 1, end + engine.model.num_modules + 2):
        engine.reset()
        engine.generate(first)
        second = [*first[:shared], (first[shared] + 1) % VOCAB, *prompt(6, seed=shared)]
        reused = engine.add(second)
        engine.run()
        assert engine.output[reused] == list(engine.text(second, 8))
        cached = next(d for d in engine.deltas if d.request_id == reused).num_cached_tokens
        assert cached >= (shared - engine.model.num_modules) // page_size * page_size
        # The same prompt again recomputes at least one token and produces the same text.
        again = engine.add(second)
        engine.run()
        assert engine.output[again] == engine.output[reused]


@pytest.mark.parametrize("page_size", [2, 4])
@pytest.mark.parametrize("name", ["chain-1", "chain-3", "target-fed-4", "hybrid-2"])
def test_third_request_continues_second_past_the_page_where_it_left_the_first(
    name: str, page_size: int
) -> None:
    """With keys over the page's tokens alone the third request finds the first one's module
    page.
    """
    engine = fresh(name, scripted=False, page_size=page_size)
    a = prompt(14)
    b = [*a[:page_size], *((token + 1) % VOCAB for token in a[page_size:])]
    c = b[:-2] + prompt(5, seed=3)
    for ids in (a, b, c):
        assert engine.generate(ids) == list(engine.text(ids, 8))


@pytest.mark.parametrize("name", ["chain-3", "hybrid-2"])
def test_preemption_and_slot_reuse(name: str) -> None:
    """A pool of little more than one request: running requests are preempted and recomputed."""
    needed = 13 + (6 if name == "hybrid-2" else 0)
    engine = fresh(name, scripted=False, page_size=4, num_pages=needed + 4)
    names = {}
    for seed in range(5):
        ids = prompt(9 + seed, seed)
        params = SamplingParams(temperature=0.0, max_tokens=30)
        names[engine.add(ids, params)] = ids
    engine.run()
    assert engine.core.scheduler.num_preemptions > 0
    for name_, ids in names.items():
        assert engine.output[name_] == list(engine.text(ids, 30))


@pytest.mark.parametrize("name", ["chain-3", "hybrid-2"])
def test_aborts_at_any_time_leave_neighbours_alone(name: str) -> None:
    engine = fresh(name, scripted=False)
    rng = np.random.default_rng(0)
    kept = {}
    for seed in range(8):
        ids = prompt(5 + seed, seed)
        named = engine.add(ids, SamplingParams(temperature=0.0, max_tokens=12))
        kept[named] = ids
        for _ in range(int(rng.integers(0, 4))):
            engine.step()
        if seed % 2:
            engine.core.finish(named)
            del kept[named]
    engine.run()
    for named, ids in kept.items():
        assert engine.output[named] == list(engine.text(ids, 12))


def test_draft_counts_reach_every_module() -> None:
    """A perfect script accepts all drafts: N+1 tokens per decode step."""
    engine = fresh("chain-3", scripted=True)
    ids = prompt(6)
    engine.generate(ids, SamplingParams(temperature=0.0, max_tokens=17))
    decodes = [delta for delta in engine.deltas if delta.drafted]
    assert [delta.accepted for delta in decodes] == [3, 3, 3, 3]


def test_a_hit_maps_no_more_than_its_windows_read() -> None:
    """Modules rewrite nothing below the hit, so no page in front of its window is needed."""
    engine = fresh("target-fed-4", scripted=False)
    ids = prompt(20)
    engine.generate(ids)
    engine.chunk = lambda request, limit: 1
    engine.deltas.clear()
    assert engine.generate([*ids[:18], 1]) == list(engine.text([*ids[:18], 1], 8))
    assert engine.deltas[0].num_cached_tokens == 12
