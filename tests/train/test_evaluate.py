"""What an engine counts is what the teacher-forced drafts of its texts say, verification by
verification."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_for_tests import load_tiny, tiny_model

from mmtp_jax.checks import ConfigError
from mmtp_jax.engine.stats import Acceptance
from mmtp_jax.train.drafts import tokens_per_verification, walk
from mmtp_jax.train.evaluate import evaluate
from mmtp_jax.train.options import EvaluateOptions

SETS = {
    "first": [[{"role": "user", "content": text}] for text in ("hello", "a b c", "1 + 1 = 2", "x")],
    "second": [[{"role": "user", "content": "zz top"}]],
}


def test_engine_and_texts_agree() -> None:
    options = EvaluateOptions(temperatures=(0.0, 1.0), max_tokens=40)
    found = list(evaluate(tiny_model(), SETS, options))
    assert [(one.prompts, one.temperature, one.num_prompts) for one in found] == [
        ("first", 0.0, 4),
        ("first", 1.0, 4),
        ("second", 0.0, 1),
        ("second", 1.0, 1),
    ]
    assert any(one.tokens_per_step > 1.02 for one in found)  # some drafts were right
    for one in found:
        assert one.expected_tokens_per_step[-1] == pytest.approx(one.tokens_per_step)
        assert list(one.expected_tokens_per_step) == sorted(one.expected_tokens_per_step)
        assert one.reached[0] == pytest.approx(one.acceptance[0])
        assert sum(one.reached) == pytest.approx(one.tokens_per_step - 1)


def test_limit_and_what_is_refused() -> None:
    options = EvaluateOptions(temperatures=(0.0,), max_tokens=4, limit=1)
    assert [one.num_prompts for one in evaluate(tiny_model(), SETS, options)] == [1, 1]
    loaded = tiny_model(k=0)
    with pytest.raises(ConfigError, match="no module for every draft"):
        next(evaluate(loaded, SETS, options))
    with pytest.raises(ConfigError, match="num_speculative_tokens must be a number, got 'auto'"):
        next(evaluate(load_tiny({"num_speculative_tokens": "auto"}), SETS, options))
    with pytest.raises(ConfigError, match="no tokenizer"):
        next(evaluate(replace(tiny_model(), tokenizer=None), SETS, options))
    for wrong, message in (
        ({"temperatures": ()}, "temperatures must not be empty"),
        ({"temperatures": (3.0,)}, r"temperatures must be in \[0, 2\]"),
        ({"max_tokens": 1}, "max_tokens must be >= 2"),
        ({"limit": 0}, "limit must be >= 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            EvaluateOptions(**wrong)


@given(
    hits=st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=1, max_size=4),
    first=st.integers(1, 11),
    stopped=st.booleans(),
)
def test_a_walk_emits_the_whole_text(hits: list[list[bool]], first: int, stopped: bool) -> None:
    acceptance = Acceptance(len(hits))
    walk(np.array(hits), first, stopped=stopped, acceptance=acceptance)
    verifications = sum(acceptance._by_drafted)
    assert verifications + sum(acceptance.accepted) == 12 - 1 - first
    assert tokens_per_verification(acceptance) >= 1.0


def test_a_walk_by_hand() -> None:
    hits = np.zeros((2, 9), bool)
    hits[0, [4, 7, 8]] = True  # the drafts for the token after the newest
    hits[1, [5]] = True
    acceptance = Acceptance(2)
    # Newest 3: drafts for 4 and 5 are right, 6 comes with them; newest 6: 7 is right, 8 comes.
    walk(hits, 3, stopped=False, acceptance=acceptance)
    assert (acceptance.drafted, acceptance.accepted) == ([2, 1], [2, 1])
    assert tokens_per_verification(acceptance) == 2.5
