"""The default model end to end, float32 on a CPU: known text, and speculation changes no bit.

Expected ids: greedy decoding of the same GGUF file with transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from models_for_tests import smollm2_path

import mmtp_jax.weights.gguf_reader as gguf_reader
from mmtp_jax import LLM, SamplingParams
from mmtp_jax.engine.plan import StepOutput

QUESTION = [{"role": "user", "content": "What is gravity?"}]
PROMPT_IDS = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018]
PROMPT_IDS += [411, 407, 19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 9354, 47, 2, 198, 1, 520]
PROMPT_IDS += [9531, 198]
ANSWER_IDS = [22007, 6463, 314, 253, 4959, 1909, 281, 6944, 338, 6601, 260, 26589, 282, 42548, 2952]
ANSWER_IDS += [411, 260, 4313, 282, 2389, 30, 657, 506, 253, 4959, 2325, 282, 260, 6128, 338]
END_OF_TURN = 2

PROMPTS = (
    "What is gravity?",
    "List three prime numbers.",
    "Write a haiku about rain.",
    "Translate 'good morning' into French.",
    "How many days are in a leap year, and why does the calendar need them at all?",
    "def fibonacci(n):",
    "Once upon a time",
    "Name the capital of Japan.",
    "2 + 2 =",
    "Explain photosynthesis to a child in one sentence.",
    "A",
    "The quick brown fox jumps over the lazy dog. " * 6,
    "Give me a recipe for pancakes.",
    "Who wrote Hamlet?",
    "SELECT name FROM users WHERE",
    "What is the boiling point of water at sea level in degrees Celsius?",
    "Summarise: the meeting is moved to Tuesday.",
    "Hello!",
    "The three laws of motion are",
    "Why is the sky blue?",
)


class LogitRows:
    """The target's logits by position: rows of rejected drafts are overwritten when recomputed."""

    def __init__(self) -> None:
        self.rows: dict[int, np.ndarray] = {}

    def collect(self, output: StepOutput, row: int) -> None:
        collected = output.collected
        assert collected is not None
        real, request, position, logits = jax.device_get(
            (
                collected.target_real,
                collected.target_request,
                collected.target_position,
                collected.target_logits,
            )
        )
        for index in np.flatnonzero(real & (request == row)):
            self.rows[int(position[index])] = logits[index]


def load(model: Path | str, num_modules: int, rows: int = 64) -> LLM:
    """One bucket, by default of 64 rows: the shape in which float32 logits have the same bits in
    any batch."""
    return LLM(
        str(model),
        dtype="float32",
        speculative_config={"num_speculative_tokens": num_modules, "load_format": "dummy"},
        max_model_len=256,
        max_num_seqs=7,
        max_num_batched_tokens=rows,
        row_multiple=rows,
        progress=False,
    )


def run_with_logits(
    llm: LLM, prompts: tuple[str, ...], params: SamplingParams
) -> tuple[list[list[int]], list[dict[int, np.ndarray]]]:
    """Tokens and all committed target logits of every prompt, run together."""
    core = llm.core
    tokens: dict[str, list[int]] = {}
    rows = [LogitRows() for _ in prompts]

    def work(core):
        core.cache.reset_prefix_cache()
        for index, prompt in enumerate(prompts):
            ids = llm.tokenizer.chat_ids([{"role": "user", "content": prompt}])
            name = f"bits-{index}"
            tokens[name] = []
            core.add(name, ids, params, seed=index, collector=rows[index].collect)
            lengths[name] = len(ids)
        while core.has_work:
            for delta in core.step():
                tokens[delta.request_id].extend(delta.token_ids)

    lengths: dict[str, int] = {}
    llm._driver.call(work)
    assert core.scheduler.num_preemptions == 0
    kept = []
    for index in range(len(prompts)):
        name = f"bits-{index}"
        last = lengths[name] + len(tokens[name]) - 2
        kept.append({at: row for at, row in rows[index].rows.items() if at <= last})
    return list(tokens.values()), kept


def assert_same_bits(
    plain_llm: LLM, num_modules: int, prompts: tuple[str, ...], max_tokens: int
) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    sampled = SamplingParams(temperature=1.0, max_tokens=max_tokens)
    plain = [run_with_logits(plain_llm, prompts, params) for params in (greedy, sampled)]
    with load(smollm2_path(), num_modules) as llm:
        for params, (tokens, rows) in zip((greedy, sampled), plain, strict=True):
            spec_tokens, spec_rows = run_with_logits(llm, prompts, params)
            assert spec_tokens == tokens
            for mine, theirs in zip(spec_rows, rows, strict=True):
                assert mine.keys() == theirs.keys()
                for position in mine:
                    assert np.array_equal(mine[position], theirs[position]), position
        assert llm.core.stats.acceptance.drafted[-1] > 0


@pytest.fixture(scope="module")
def plain_llm() -> Iterator[LLM]:
    with load(smollm2_path(), 0) as llm:
        yield llm


def test_known_answer() -> None:
    with load(smollm2_path(), 0, rows=16) as llm:
        output = llm.chat(QUESTION, SamplingParams(temperature=0.0, max_tokens=30))[0]
    assert list(output.prompt_token_ids) == PROMPT_IDS
    assert list(output.token_ids) == ANSWER_IDS
    assert output.text.startswith("Gravity is a fundamental concept in physics")


@pytest.mark.slow
def test_rows_left_permuted_do_not_give_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama GGUF files store q and k rows for interleaved rotation; reading them as they are breaks
    the model at once, so `test_known_answer` proves the mapping."""
    monkeypatch.setattr(gguf_reader, "unpermute", lambda rows, num_heads: rows)
    with load(smollm2_path(), 0) as llm:
        output = llm.chat(QUESTION, SamplingParams(temperature=0.0, max_tokens=8))[0]
    assert list(output.token_ids) != ANSWER_IDS[: len(output.token_ids)]
    assert output.token_ids[0] == END_OF_TURN


@pytest.mark.slow
def test_speculation_changes_no_bit_on_a_few_prompts(plain_llm: LLM) -> None:
    assert_same_bits(plain_llm, 3, PROMPTS[:3], max_tokens=6)


@pytest.mark.slow
@pytest.mark.parametrize("num_modules", [1, 3, 8])
def test_speculation_changes_no_bit(plain_llm: LLM, num_modules: int) -> None:
    assert_same_bits(plain_llm, num_modules, PROMPTS, max_tokens=24)
