"""A fixed batch decodes in step, and repeating one of its steps leaves it as it was."""

from __future__ import annotations

import pytest
from models_for_tests import write_tiny_llama

from mmtp_jax.bench.bare import bare_step
from mmtp_jax.bench.batch import FixedBatch, random_prompts
from mmtp_jax.bench.presets import ModelOptions
from mmtp_jax.bench.roofline import Part
from mmtp_jax.config import ConfigError

PROMPT = 7
CONTEXT = 112


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> FixedBatch:
    """Two requests, two modules, and room for five rows of a prompt beside them."""
    folder = tmp_path_factory.mktemp("mimo")
    model = write_tiny_llama(folder, modules=2, family="mimo", num_hidden_layers=1)
    options = ModelOptions(str(model), "auto", "float32", 0, {}, 1)
    loaded = options.load(2, max_model_len=CONTEXT)
    return FixedBatch(loaded, random_prompts(2, PROMPT, 64), prefill_chunk=5)


def test_prompts_depend_on_their_index_and_length() -> None:
    prompts = random_prompts(3, 20, 64)
    assert prompts == random_prompts(4, 20, 64)[:3] and prompts[0] != prompts[1]
    assert all(len(prompt) == 20 and 0 <= min(prompt) <= max(prompt) < 64 for prompt in prompts)


@pytest.mark.slow
def test_all_requests_begin_to_decode_in_the_same_step(batch: FixedBatch) -> None:
    batch.start()
    assert [request.length for request in batch.running] == [PROMPT, PROMPT]
    assert [request.slot for request in batch.running] == [0, 1]
    # The first read is that of the step which ended the prompts: one token each.
    assert batch.steps(1).emitted == 2
    batch.finish()


@pytest.mark.slow
def test_repeating_a_step_changes_nothing(batch: FixedBatch) -> None:
    expected = batch.run_to_the_end()
    assert [len(text) for text in expected] == [CONTEXT, CONTEXT]
    batch.start()
    batch.steps(3)
    bare = bare_step(batch, steps=4)
    assert bare.rows == 6 and bare.milliseconds > 0
    lengths = [request.length for request in batch.running]
    assert bare.parts == tuple(Part(length + 2, 3, True) for length in lengths)
    assert batch.continue_to_the_end() == expected


def test_steps_with_chunks_hold_as_many_rows(batch: FixedBatch) -> None:
    batch.start()
    timing = batch.steps_with_chunks(1)
    assert len(timing.milliseconds) == 4
    bare = bare_step(batch, steps=2)
    assert bare.rows == 6 + 5
    assert bare.parts[2:] == (Part(context=5 * 5, rows=5, samples=False),)
    batch.finish()
    assert not batch.core.has_work


@pytest.mark.slow
def test_requests_that_end_are_said(batch: FixedBatch) -> None:
    batch.start()
    with pytest.raises(ConfigError, match="raise max_model_len"):
        batch.steps(CONTEXT)
    batch.finish()
