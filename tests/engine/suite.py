"""Whatever happens to a request, its text, every cache entry and every draft are the oracle's.

Invariants 1-10 of the exactness rules: any accepted count and any k <= N in any step, prompts of
1..N+2 tokens, any chunking, neighbours, slot reuse, prefix hits, preemption, NaN in free pages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
from engine.harness import Harness
from engine.models import VOCAB
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmtp_jax.engine.request import Drafts, Request
from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.specs import ModelConfig

# By page size: too few for three long requests at once, enough for what the prefix tests reuse.
NUM_PAGES = {2: 36, 4: 20, 16: 7}


@functools.lru_cache(maxsize=4)
def built(model: Callable[[], ModelConfig], page_size: int, behind: int | None = None) -> Harness:
    """The engine of a model. Compiling it takes most of a test's time, so a few are kept."""
    return Harness(
        model(),
        scripted=True,
        page_size=page_size,
        num_pages=NUM_PAGES[page_size],
        behind=behind,
    )


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, VOCAB, length).tolist()


def limited(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


class Exactness:
    """Tests of an `engine`, a fixture of the module that inherits them."""

    def test_prompts_of_any_length_decode_like_the_oracle(self, engine: Harness) -> None:
        engine.reset()
        for length in range(1, engine.model.num_drafts + 5):
            ids = prompt(length)
            assert engine.generate(ids, wrong=None) == list(engine.text(ids, 8))

    def test_log_probabilities_are_those_of_the_oracle(self, engine: Harness) -> None:
        engine.reset()
        ids = prompt(7)
        params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1)
        text = [*ids, *engine.generate(ids, params, wrong=None)]
        logits = engine.oracle.trace(text).logits[len(ids) - 1 : -1]
        want = np.max(logits - np.log(np.sum(np.exp(logits), axis=1, keepdims=True)), axis=1)
        got = [entry.chosen for delta in engine.deltas for entry in delta.logprobs or ()]
        np.testing.assert_allclose(got, want, atol=1e-5)

    @settings(max_examples=12, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def test_any_history_of_accepted_and_verified_counts(
        self, engine: Harness, data: st.DataObject
    ) -> None:
        check_random_history(engine, data)

    @pytest.mark.slow
    @settings(max_examples=150, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def test_many_histories(self, engine: Harness, data: st.DataObject) -> None:
        check_random_history(engine, data)

    def test_any_chunk_size(self, engine: Harness) -> None:
        count, page = engine.model.num_drafts, engine.page_size
        for rows in {1, 3, count - 1, count, count + 1, page - 1, page + 1}:
            if rows < 1:
                continue
            engine.reset()
            engine.chunk = lambda request, limit, rows=rows: min(rows, limit)
            first = engine.add(prompt(17), wrong=None)
            second = engine.add(prompt(11, seed=1), wrong=None)
            engine.run()
            assert engine.output[first] == list(engine.text(prompt(17), 8))
            assert engine.output[second] == list(engine.text(prompt(11, seed=1), 8))

    def test_prefix_hits_equal_cold_prefill(self, engine: Harness) -> None:
        """Shared lengths E-1 .. E+N+1 around a page end, pages smaller than N included."""
        end, count = max(8, engine.page_size), engine.model.num_modules
        first = prompt(end + count + 4)
        for shared in range(end - 1, end + count + 2):
            engine.reset()
            engine.generate(first, wrong=None)
            second = [*first[:shared], (first[shared] + 1) % VOCAB, *prompt(6, seed=shared)]
            reused = engine.add(second, wrong=None)
            engine.run()
            assert engine.output[reused] == list(engine.text(second, 8))
            cached = next(d for d in engine.deltas if d.request_id == reused).num_cached_tokens
            assert cached >= (shared - count) // engine.page_size * engine.page_size
            # The same prompt again recomputes at least one token and produces the same text.
            again = engine.add(second, wrong=None)
            engine.run()
            assert engine.output[again] == engine.output[reused]

    @pytest.mark.parametrize("forgotten", ["target", "modules"])
    def test_hits_in_the_other_groups_alone(self, engine: Harness, forgotten: str) -> None:
        """Entries that are there stay as they are, also beyond what is computed first."""
        engine.reset()
        first = prompt(18)
        engine.generate(first, wrong=None)
        cache = engine.core.cache
        for group, pool in zip(cache.groups, cache.pools, strict=True):
            if group.owner == forgotten:
                pool.reset_prefix_cache()
        second = [*first[:15], (first[15] + 1) % VOCAB]
        engine.chunk = lambda request, limit: min(3, limit)
        assert engine.generate(second, wrong=None) == list(engine.text(second, 8))

    def test_third_request_continues_second_past_the_page_where_it_left_the_first(
        self, engine: Harness
    ) -> None:
        """With keys over the page's tokens alone the third request finds the first one's module
        page.
        """
        engine.reset()
        a = prompt(engine.page_size + 10)
        b = [*a[: engine.page_size], *((token + 1) % VOCAB for token in a[engine.page_size :])]
        c = b[:-2] + prompt(5, seed=3)
        for ids in (a, b, c):
            assert engine.generate(ids, wrong=None) == list(engine.text(ids, 8))

    def test_preemption_and_slot_reuse(self, engine: Harness) -> None:
        """Running requests are preempted and recomputed."""
        engine.reset()
        before, texts = engine.core.scheduler.num_preemptions, {}
        for seed in range(5):
            ids = prompt(9 + seed, seed)
            texts[engine.add(ids, limited(30), wrong=None)] = list(engine.text(ids, 30))
        engine.run()
        assert engine.core.scheduler.num_preemptions > before
        assert engine.output == texts

    def test_aborts_at_any_time_leave_neighbours_alone(self, engine: Harness) -> None:
        engine.reset()
        rng = np.random.default_rng(0)
        texts = {}
        for seed in range(8):
            ids = prompt(5 + seed, seed)
            name = engine.add(ids, limited(12), wrong=None)
            texts[name] = list(engine.text(ids, 12))
            for _ in range(int(rng.integers(0, 4))):
                engine.step()
            if seed % 2:
                engine.core.finish(name)
                del texts[name]
        engine.run()
        assert {name: engine.output[name] for name in texts} == texts


def check_random_history(engine: Harness, data: st.DataObject) -> None:
    """A script forces where drafts are wrong; k, chunks and arrivals vary from step to step.

    A request that awaits its results has no step in flight when one is read. Without a prefix cache
    the pages that no window reaches are filled with NaN at once.
    """
    engine.reset()
    engine.core.cache.enable_prefix_caching = data.draw(st.booleans())
    count = engine.model.num_drafts
    # Drawing inside the scheduler could end the example in the middle of a decision.
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))

    def draft(request: Request) -> Drafts:
        propose = count
        if engine.behind is not None:
            # Stretches of few drafts make modules fall behind.
            propose = request.proposed if rng.random() < 0.5 else int(rng.integers(0, count + 1))
        return Drafts(int(rng.integers(0, count + 1)), propose)

    engine.drafts = draft
    modules = engine.model.num_modules
    engine.depth = lambda request: int(rng.choice([modules, rng.integers(0, modules + 1)]))
    engine.chunk = lambda request, limit: int(rng.integers(1, limit + 1))
    expected = {}
    for seed in range(data.draw(st.integers(1, 4))):
        ids = prompt(data.draw(st.integers(1, 14)), seed)
        max_tokens = data.draw(st.integers(1, 16))
        wrong = data.draw(st.sets(st.integers(0, 32), max_size=16))
        if any(script.prompt == tuple(ids) for script in engine.scripts):
            continue
        name = engine.add(ids, limited(max_tokens), sorted(wrong))
        engine.core.scheduler.waiting[-1].awaits_result = data.draw(st.booleans())
        expected[name] = list(engine.text(ids, max_tokens))
        for _ in range(data.draw(st.integers(0, 3))):
            engine.step()
    engine.run()
    assert {request: engine.output[request] for request in expected} == expected
