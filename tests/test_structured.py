"""Structured outputs: always valid, equal with and without speculation, nobody else's concern."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
from functools import cache
from typing import Any

import jax.numpy as jnp
import llguidance
import numpy as np
import pytest
from llm_for_tests import (
    EOS,
    MAX_MODEL_LEN,
    MODULES,
    VOCAB,
    assert_idle,
    load_tiny,
    tiny_model,
    tiny_oracle,
)
from models_for_tests import JSON_CHARACTERS

from mmtp_jax.config import ConfigError
from mmtp_jax.engine.grammar import Grammars, fill_masks
from mmtp_jax.llm import LLM
from mmtp_jax.loader import LoadedModel
from mmtp_jax.outputs import RequestOutput
from mmtp_jax.sampling.params import SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yes"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ITEMS = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "schema": {"json": SCHEMA},
    "array": {"json": json.dumps(ITEMS)},
    "regex": {"regex": r"(ab|cd){2,5}-[0-9]{3}"},
    "choice": {"choice": ["yes", "no", "not at all"]},
    "lark": {"grammar": 'start: "<" WORD ">"\nWORD: /[a-z]{1,6}/'},
    "object": {"json_object": True},
}
CASES = {
    f"{name} {temperature} {seed}": SamplingParams(
        structured_outputs=fields, temperature=temperature, seed=seed, max_tokens=70, logprobs=2
    )
    for name, fields in CONSTRAINTS.items()
    for temperature, seed in ((0.0, 0), (1.0, 1), (1.0, 2))
}
PROMPTS = {name: [5 + i, 9, 11, *range(20, 20 + i)] for i, name in enumerate(CASES)}
FREE = [SamplingParams(temperature=1.0, seed=50 + i, max_tokens=30) for i in range(4)]
FREE_PROMPTS = [[40 + i, 41, 42] for i in range(4)]


@cache
def model(k: int = MODULES, **options: int) -> LoadedModel:
    return load_tiny({"num_speculative_tokens": k}, characters=JSON_CHARACTERS, **options)


def run(llm: LLM) -> dict[str, RequestOutput]:
    """All cases at once, among requests that are free."""
    prompts = [*PROMPTS.values(), *FREE_PROMPTS]
    outputs = llm.generate(prompts, [*CASES.values(), *FREE])
    assert_idle(llm)
    names = [*CASES, *(f"free {i}" for i in range(len(FREE)))]
    return dict(zip(names, outputs, strict=True))


@cache
def shared(k: int = MODULES) -> LLM:
    """An engine for all tests that need nothing special."""
    return LLM.from_loaded(model(k))


@cache
def plain() -> dict[str, RequestOutput]:
    return run(shared(0))


@cache
def drafted() -> dict[str, RequestOutput]:
    return run(shared())


@cache
def forced() -> dict[str, RequestOutput]:
    """Drafts are the right texts, so that several masked rows are accepted in a step."""
    table = np.zeros((VOCAB, MAX_MODEL_LEN + MODULES), np.int32)
    for name, prompt in PROMPTS.items():
        text = [*prompt, *plain()[name].token_ids]
        table[prompt[0], : len(text)] = text

    def choose(logits, sampling, slot, index, history):
        first = history.at[slot, 0].get(mode="clip")
        return jnp.asarray(table)[first, index]

    with LLM.from_loaded(model(), choose_draft=choose) as llm:
        outputs = run(llm)
        accepted = llm.stats()["accepted_by_position"]
    assert accepted[-1] > 20
    return outputs


def check(name: str, output: RequestOutput) -> None:
    text, kind = output.text, name.split()[0]
    if output.finish_reason == "length":
        return
    assert output.finish_reason == "stop"
    if kind == "schema":
        value = json.loads(text)
        assert set(value) == {"a", "b"}
        assert isinstance(value["a"], int) and value["b"] in ("x", "yes")
    elif kind == "array":
        value = json.loads(text)
        assert 2 <= len(value) <= 3 and all(isinstance(one, bool) for one in value)
    elif kind == "object":
        assert isinstance(json.loads(text), dict)
    elif kind == "choice":
        assert text in CONSTRAINTS["choice"]["choice"]
    else:
        pattern = CONSTRAINTS["regex"]["regex"] if kind == "regex" else r"<[a-z]{1,6}>"
        assert re.fullmatch(pattern, text)


@pytest.mark.parametrize("name", CASES)
def test_the_text_matches(name: str) -> None:
    for outputs in (plain(), drafted(), forced()):
        check(name, outputs[name])


def test_texts_end() -> None:
    reasons = [plain()[name].finish_reason for name in CASES]
    assert reasons.count("stop") >= len(CASES) * 2 / 3


@pytest.mark.parametrize("name", [*CASES, "free 0", "free 1", "free 2", "free 3"])
def test_speculation_changes_nothing(name: str) -> None:
    for outputs in (drafted(), forced()):
        assert outputs[name].token_ids == plain()[name].token_ids
        assert outputs[name].finish_reason == plain()[name].finish_reason
        for one, other in zip(
            outputs[name].logprobs or (), plain()[name].logprobs or (), strict=True
        ):
            assert one.chosen == pytest.approx(other.chosen, abs=1e-4)


def test_requests_without_a_grammar_are_as_if_alone() -> None:
    alone = [
        shared(0).generate(prompt, params)[0]
        for prompt, params in zip(FREE_PROMPTS, FREE, strict=True)
    ]
    for index, output in enumerate(alone):
        assert output.token_ids == plain()[f"free {index}"].token_ids


def allowed(params: SamplingParams, tokens: tuple[int, ...]) -> list[np.ndarray]:
    """The allowed ids at every place of an output, one token at a time."""
    loaded = model()
    assert loaded.tokenizer is not None
    grammar = Grammars(loaded.tokenizer, VOCAB, (EOS,)).compile(params)
    sets = []
    for token in tokens:
        masks = np.full((1, 1, VOCAB // 32), -1, np.int32)
        fill_masks(masks, [(grammar, ())])
        bits = np.unpackbits(masks.reshape(-1).view(np.uint8), bitorder="little")
        sets.append(np.flatnonzero(bits))
        grammar.advance([token])
    return sets


@pytest.mark.parametrize("name", [name for name in CASES if " 0.0 " in name])
def test_greedy_takes_the_best_allowed_token(name: str) -> None:
    tokens = forced()[name].token_ids
    prompt = PROMPTS[name]
    logits = tiny_oracle().trace([*prompt, *tokens]).logits[len(prompt) - 1 : -1]
    restricted = 0
    for token, row, ids in zip(tokens, logits, allowed(CASES[name], tokens), strict=True):
        assert token in ids
        assert row[token] >= row[ids].max() - 1e-4
        restricted += int(row.argmax() != token)
    assert restricted > 0


@pytest.mark.parametrize("name", [name for name in CASES if " 1.0 " in name])
def test_sampled_tokens_are_allowed(name: str) -> None:
    tokens = drafted()[name].token_ids
    for token, ids in zip(tokens, allowed(CASES[name], tokens), strict=True):
        assert token in ids


def test_preemption_and_small_pages() -> None:
    with LLM.from_loaded(model(num_pages=26)) as llm:
        outputs = run(llm)
        assert llm.stats()["preemptions"] > 0
    for name, output in outputs.items():
        assert output.token_ids == plain()[name].token_ids


@pytest.mark.slow
def test_one_slot() -> None:
    with LLM.from_loaded(model(max_num_seqs=1, max_num_batched_tokens=5)) as llm:
        outputs = run(llm)
    for name, output in outputs.items():
        assert output.token_ids == plain()[name].token_ids


def test_samples_have_grammars_of_their_own() -> None:
    params = SamplingParams(
        n=4, structured_outputs=CONSTRAINTS["regex"], temperature=1.0, seed=3, max_tokens=40
    )
    (output,) = shared().generate([[5, 6, 7]], params)
    texts = [sample.text for sample in output.outputs]
    assert len(set(texts)) > 1
    assert all(re.fullmatch(CONSTRAINTS["regex"]["regex"], text) for text in texts)


def test_stops_still_end_the_text() -> None:
    llm = shared()
    params = SamplingParams(structured_outputs={"regex": "a{5}b"}, temperature=0.0, stop="aaa")
    (output,) = llm.generate([[5, 6, 7]], params)
    assert (output.text, output.outputs[0].stop_reason) == ("", "aaa")
    (token,) = llm.tokenizer.encode("b")
    params = dataclasses.replace(params, stop=(), stop_token_ids=[token])
    (output,) = llm.generate([[5, 6, 7]], params)
    assert (output.text, output.outputs[0].stop_reason) == ("aaaaa", token)
    assert_idle(llm)


def test_a_grammar_that_fails_ends_its_request_only() -> None:
    """One fails when its masks are computed (only the end of the text is left then), one has no
    token to go on with: this vocabulary has no braces."""
    names = [name for name in CASES if name.startswith("regex")]
    failing = [
        SamplingParams(structured_outputs={"grammar": 'start: a*\na: "a" | "b" a | a a'}, n=2),
        SamplingParams(structured_outputs={"json_object": True}),
    ]
    limited = llguidance.LLParserLimits(step_max_items=5, verbose_errors=False)
    with LLM.from_loaded(tiny_model()) as llm:
        alone = llm.generate([PROMPTS[name] for name in names], [CASES[name] for name in names])
        assert llm._grammars is not None
        llm._grammars._limits = limited
        outputs = llm.generate(
            [[5, 6, 7], [5, 6, 7], *(PROMPTS[name] for name in names)],
            [*failing, *(CASES[name] for name in names)],
        )
        assert_idle(llm)
    for output in outputs[:2]:
        for sample in output.outputs:
            assert sample.finish_reason == "error" and len(sample.token_ids) >= 1
    for output, expected in zip(outputs[2:], alone, strict=True):
        assert output.finish_reason in ("stop", "length")
        assert output.token_ids == expected.token_ids


def test_leaving_a_stream_in_the_middle() -> None:
    endless = SamplingParams(structured_outputs={"regex": "[a-z]{80}"}, temperature=1.0, seed=4)
    endless = dataclasses.replace(endless, max_tokens=None)
    name = "regex 1.0 1"

    async def leave(llm: LLM) -> str:
        async with contextlib.aclosing(llm.stream([5, 6, 7], endless)) as stream:
            async for output in stream:
                if len(output.token_ids) > 5:
                    return output.text
        raise AssertionError("the stream ended")

    llm = shared()
    assert re.fullmatch("[a-z]{6,}", asyncio.run(leave(llm)))
    assert llm.generate([PROMPTS[name]], CASES[name])[0].token_ids == plain()[name].token_ids
    assert_idle(llm)


def test_chat_answers_match() -> None:
    params = SamplingParams(structured_outputs={"choice": ["yes", "no"]}, temperature=0.0)
    (output,) = shared().chat([{"role": "user", "content": "is it?"}], params)
    assert output.text in ("yes", "no") and output.finish_reason == "stop"


def test_models_that_cannot() -> None:
    params = SamplingParams(structured_outputs={"regex": "a"})
    without = load_tiny({"num_speculative_tokens": 0}, tokenizer=False)
    with LLM.from_loaded(without) as llm:
        with pytest.raises(ConfigError, match="structured_outputs need a tokenizer"):
            llm.generate([[5]], params)
        assert llm.generate([[5]])[0].token_ids
    tokenizer = tiny_model().tokenizer
    assert tokenizer is not None
    with pytest.raises(ConfigError, match="end-of-sequence"):
        Grammars(tokenizer, VOCAB, ()).compile(params)
    with pytest.raises(ConfigError, match="at most 60 tokens"):
        Grammars(tokenizer, 60, (EOS,)).compile(params)


def test_a_vocabulary_wider_than_the_tokenizer() -> None:
    tokenizer = tiny_model().tokenizer
    assert tokenizer is not None
    grammar = Grammars(tokenizer, 100, (EOS,)).compile(
        SamplingParams(structured_outputs={"grammar": "start: /[^x]/"})
    )
    masks = np.full((1, 1, 4), -1, np.int32)
    fill_masks(masks, [(grammar, ())])
    bits = np.unpackbits(masks.reshape(-1).view(np.uint8), bitorder="little")
    assert bits[:64].any() and not bits[64:].any()
