"""Log-probabilities of prompts and what follows them, against the float64 model, in any company."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from llm_for_tests import assert_idle, load_tiny, prompt_ids, tiny_llm, tiny_oracle

from mmtp_jax.engine.delta import TokenLogprobs
from mmtp_jax.llm import LLM
from mmtp_jax.outputs import RequestOutput
from mmtp_jax.sampling.params import SamplingParams


def check(output: RequestOutput, count: int) -> None:
    """Every prompt token but the first, from the raw logits of the row before it."""
    prompt = list(output.prompt_token_ids)
    found = output.prompt_logprobs
    assert found is not None
    check_rows(found, prompt, 1, count)


def check_emitted(output: RequestOutput, count: int) -> None:
    """Every emitted token, from the raw logits of the row before it."""
    prompt, (sample,) = list(output.prompt_token_ids), output.outputs
    assert sample.logprobs is not None
    check_rows(sample.logprobs, prompt + list(sample.token_ids), len(prompt), count)


def check_rows(found: Sequence[TokenLogprobs], text: list[int], first: int, count: int) -> None:
    """`found` are those of the text's tokens from index `first` on, with `count` alternatives."""
    logits = tiny_oracle().trace(text).logits
    shifted = logits - logits.max(axis=1, keepdims=True)
    expected = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    assert len(found) == len(text) - first
    for index, one in enumerate(found, first):
        row = expected[index - 1]
        assert one.chosen == pytest.approx(row[text[index]], abs=1e-4)
        assert len(one.top_ids) == count
        best = np.sort(row)[::-1][:count]
        assert np.allclose(one.top_values, best, atol=1e-4)
        assert np.allclose(row[list(one.top_ids)], best, atol=1e-4)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 40, 90])
def test_every_length(length: int) -> None:
    params = SamplingParams(max_tokens=2, prompt_logprobs=3, temperature=0.5, seed=1)
    (output,) = tiny_llm().generate([prompt_ids(length)], params)
    check(output, 3)


def test_in_company_of_others() -> None:
    prompts = [prompt_ids(length, seed=4) for length in (30, 7, 50, 12, 44, 3)]
    params = [
        SamplingParams(max_tokens=8, temperature=0.0, prompt_logprobs=count, logprobs=1)
        for count in (0, None, 20, None, 1, 5)
    ]
    outputs = tiny_llm().generate(prompts, params)
    for output, one in zip(outputs, params, strict=True):
        if one.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            check(output, one.prompt_logprobs)
        check_emitted(output, 1)
    plain = tiny_llm().generate(prompts, SamplingParams(max_tokens=8, temperature=0.0))
    assert [one.token_ids for one in outputs] == [one.token_ids for one in plain]


def test_a_cached_prompt_is_computed_again() -> None:
    prompt = prompt_ids(40, seed=9)
    greedy = SamplingParams(max_tokens=2, temperature=0.0)
    tiny_llm().generate([prompt], greedy)
    assert tiny_llm().generate([prompt], greedy)[0].num_cached_tokens > 0
    params = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1, n=2)
    (output,) = tiny_llm().generate([prompt], params)
    assert output.num_cached_tokens == 0
    check(output, 1)


def test_after_preemption() -> None:
    prompts = [prompt_ids(length, seed=5) for length in (60, 50, 55, 58)]
    params = SamplingParams(
        max_tokens=30, temperature=0.0, prompt_logprobs=2, logprobs=3, ignore_eos=True
    )
    with LLM.from_loaded(load_tiny({"num_speculative_tokens": 3}, num_pages=50)) as llm:
        outputs = llm.generate(prompts, params)
        assert llm.stats()["preemptions"] > 0
        assert_idle(llm)
    for output in outputs:
        check(output, 2)
        check_emitted(output, 3)


def test_of_one_request_among_others() -> None:
    prompts = [prompt_ids(length, seed=7) for length in (20, 33, 4, 18)]
    params = [
        SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=count)
        for count in (None, 2, None, 0)
    ]
    outputs = tiny_llm().generate(prompts, params)
    for output, one in zip(outputs, params, strict=True):
        if one.logprobs is None:
            assert output.outputs[0].logprobs is None
        else:
            check_emitted(output, one.logprobs)


def test_nothing_is_computed_that_nobody_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tiny_llm().core.device.programs
    sizes: list[int] = []

    def counted(params: object, state: object, num_rows: int, program=programs.logprobs) -> object:
        sizes.append(int(num_rows))
        return program(params, state, num_rows)

    monkeypatch.setattr(programs, "logprobs", counted)
    prompt = prompt_ids(40, seed=8)
    greedy = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    tiny_llm().generate([prompt], greedy)
    assert sizes == []
    # Of three chunks of the prompt only the last one samples.
    other = prompt_ids(40, seed=9)
    tiny_llm().generate([other], dataclasses.replace(greedy, max_tokens=1, logprobs=0))
    assert len(sizes) >= 1 and sum(sizes) < len(other)


def test_several_blocks_of_rows_in_one_step() -> None:
    """A step of 96 rows, whose logits are computed 64 at a time; two prompts share it."""
    prompts = [prompt_ids(length, seed=6) for length in (70, 24)]
    params = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=2)
    loaded = load_tiny({"num_speculative_tokens": 0}, max_num_batched_tokens=96, row_multiple=32)
    with LLM.from_loaded(loaded) as llm:
        programs = llm.core.device.programs.buckets
        sizes = [(one.num_rows, one.logit_rows) for one in programs]
        assert sizes == [(32, 32), (96, 32)]
        for output in llm.generate(prompts, params):
            check(output, 2)
        assert llm.stats()["steps"] <= 4
