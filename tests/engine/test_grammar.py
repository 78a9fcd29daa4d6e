"""Grammars in the engine: every token is the target's own draw among the allowed ones.

A slow reference chooses one token at a time from the oracle's logits, with masks of a grammar of
its own. Whatever the engine does (accepted counts, chunks, neighbours, preemption, aborts), its
texts must be the same, and its drafts those of the modules alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import jax.numpy as jnp
import numpy as np
import pytest
from engine.harness import Harness
from engine.models import VOCAB, chain
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models_for_tests import CHARACTERS, SPECIAL_TOKENS, write_tiny_tokenizer

from mmtp_jax.config import ConfigError
from mmtp_jax.engine.grammar import Grammars, fill_masks
from mmtp_jax.engine.programs import MASKS_PER_UPLOAD
from mmtp_jax.engine.request import Drafts
from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.sampling.sampler import gumbel_noise
from mmtp_jax.tokenizer import load_tokenizer

EOS = 2
MODULES = 3
SLOTS = MASKS_PER_UPLOAD + 1
CONSTRAINTS = [
    {"regex": "[abc]{1,9}"},
    {"regex": "(ab|cd){1,4}x?"},
    {"regex": "a*[b-y]+z"},
    {"regex": "[a-z]+(, [a-z]+){2}"},
    {"regex": "[0-9]{12}"},
    {"regex": ".*"},
    {"choice": ["abc", "abd", "x"]},
    {"grammar": 'start: "x" start "y" | "z"'},
]


@functools.cache
def grammars() -> Grammars:
    """One token per character, as many as the test models have."""
    with TemporaryDirectory() as folder:
        write_tiny_tokenizer(Path(folder), CHARACTERS[: VOCAB - len(SPECIAL_TOKENS)])
        tokenizer = load_tokenizer(Path(folder))
    assert tokenizer is not None and tokenizer.vocab_size == VOCAB
    return Grammars(tokenizer, VOCAB, (EOS,))


@functools.cache
def harness(scripted: bool) -> Harness:
    """The engines of all tests: compiling takes most of a test's time. The scripted one has pages
    too few for three long requests at once, the other one more slots than one upload has masks."""
    model = dataclasses.replace(chain(MODULES), eos_token_ids=(EOS,))
    if scripted:
        return Harness(model, scripted=True, num_pages=20)
    return Harness(model, max_num_seqs=SLOTS, budget=SLOTS * (MODULES + 1), num_pages=110)


def fresh(scripted: bool) -> Harness:
    made = harness(scripted)
    made.reset()
    return made


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(5, VOCAB, length).tolist()


def constrained(constraint: dict, **options: object) -> SamplingParams:
    return SamplingParams(structured_outputs=constraint, **options)  # type: ignore[arg-type]


@functools.cache
def noise(seed: int) -> np.ndarray:
    index = jnp.arange(48, dtype=jnp.int32)
    return np.asarray(gumbel_noise(jnp.full(48, seed, jnp.uint32), index, VOCAB))


def reference(engine: Harness, ids: Sequence[int], params: SamplingParams) -> list[int]:
    """The text of a request, one token at a time."""
    assert params.max_tokens is not None
    grammar = None if params.structured_outputs is None else grammars().compile(params)
    tokens = list(ids)
    for index in range(len(ids), len(ids) + params.max_tokens):
        scores = engine.oracle.trace(tokens).logits[-1].copy()
        if grammar is not None:
            masks = np.zeros((1, 1, -(-VOCAB // 32)), np.int32)
            fill_masks(masks, [(grammar, ())])
            bits = np.unpackbits(masks.view(np.uint8).reshape(-1), bitorder="little")
            scores[bits[:VOCAB] == 0] = -np.inf
        if not params.greedy:
            assert params.seed is not None
            scores = scores / params.temperature + noise(params.seed)[index]
        tokens.append(int(np.argmax(scores)))
        if grammar is not None:
            grammar.advance(tokens[-1:])
            assert grammar.error is None
        if tokens[-1] == EOS:
            break
    return tokens[len(ids) :]


def start(engine: Harness, ids: list[int], params: SamplingParams, wrong: Sequence[int]) -> str:
    """Queue a request with its grammar; right drafts are those of the reference."""
    grammar = None if params.structured_outputs is None else grammars().compile(params)
    text = reference(engine, ids, params) if engine.scripted else None
    return engine.add(ids, params, wrong, grammar=grammar, text=text)


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_history_gives_the_reference_text(data: st.DataObject) -> None:
    check_random_history(data)


@pytest.mark.slow
@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_many_histories(data: st.DataObject) -> None:
    check_random_history(data)


def check_random_history(data: st.DataObject) -> None:
    """Drafts are right but where a script says so; k, chunks, arrivals and aborts vary; pages are
    short."""
    engine = fresh(scripted=True)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    engine.drafts = lambda request: Drafts(int(rng.integers(0, MODULES + 1)), MODULES)
    engine.chunk = lambda request, limit: int(rng.integers(1, limit + 1))
    running: dict[str, tuple[list[int], SamplingParams]] = {}
    for seed in range(data.draw(st.integers(1, 5))):
        ids = prompt(data.draw(st.integers(1, 14)), seed)
        if any(script.prompt == tuple(ids) for script in engine.scripts):
            continue
        options = {
            "structured_outputs": data.draw(st.sampled_from([None, *CONSTRAINTS])),
            "temperature": data.draw(st.sampled_from([0.0, 0.7])),
            "max_tokens": data.draw(st.integers(1, 25)),
            "seed": seed,
        }
        params = SamplingParams(**options)
        wrong = data.draw(st.sets(st.integers(0, 40), max_size=10))
        running[start(engine, ids, params, sorted(wrong))] = (ids, params)
        for _ in range(data.draw(st.integers(0, 4))):
            engine.step()
        if data.draw(st.integers(0, 5)) == 0:
            aborted = data.draw(st.sampled_from(sorted(running)))
            engine.core.finish(aborted)
            ids, params = running.pop(aborted)
            text = reference(engine, ids, params)
            assert engine.output[aborted] == text[: len(engine.output[aborted])]
    engine.run()
    for name, (ids, params) in running.items():
        assert engine.output[name] == reference(engine, ids, params)


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=str)
def test_drafts_are_those_of_the_modules_alone(constraint: dict) -> None:
    """The harness compares every draft with the oracle's, which knows no masks."""
    engine = fresh(scripted=False)
    params = constrained(constraint, temperature=0.0, max_tokens=20)
    names = {start(engine, prompt(n), params, ()): prompt(n) for n in (6, 11, 18)}
    engine.run()
    for name, ids in names.items():
        assert engine.output[name] == reference(engine, ids, params)


def test_masked_rows_are_accepted_together() -> None:
    engine = fresh(scripted=True)
    params = constrained({"regex": "[0-9]{12}"}, temperature=0.0, max_tokens=20)
    name = start(engine, prompt(6), params, ())
    engine.run()
    assert [len(delta.token_ids) for delta in engine.deltas] == [1, 4, 4, 4]
    assert [delta.finish_reason for delta in engine.deltas] == [None, None, None, "stop"]
    assert engine.output[name][-1] == EOS


def test_a_request_follows_its_grammar_again_after_preemption() -> None:
    engine = fresh(scripted=True)
    preemptions = engine.core.scheduler.num_preemptions
    params = [
        constrained({"regex": "[a-z]{30}"}, temperature=0.7, seed=i, max_tokens=35)
        for i in range(3)
    ]
    names = [start(engine, prompt(9 + i), params[i], range(0, 48, 5)) for i in range(3)]
    engine.run()
    assert engine.core.scheduler.num_preemptions > preemptions
    for i, name in enumerate(names):
        assert engine.output[name] == reference(engine, prompt(9 + i), params[i])


def test_a_slot_forgets_the_masks_of_the_request_before() -> None:
    """The second request decodes at the same indices in the same slot."""
    engine = fresh(scripted=False)
    params = constrained({"regex": "[0-9]{9}"}, temperature=0.0, max_tokens=10)
    start(engine, prompt(8), params, ())
    engine.run()
    free = SamplingParams(temperature=0.0, max_tokens=10)
    name = start(engine, prompt(8), free, ())
    engine.run()
    assert engine.output[name] == reference(engine, prompt(8), free)


def test_more_grammars_than_one_upload_holds() -> None:
    engine = fresh(scripted=False)
    params = constrained({"regex": "[a-z]{4}"}, temperature=0.0, max_tokens=6)
    names = {start(engine, prompt(2, i), params, ()): prompt(2, i) for i in range(SLOTS)}
    engine.step()
    assert len(engine.core.scheduler.running) == SLOTS
    engine.run()
    for name, ids in names.items():
        assert engine.output[name] == reference(engine, ids, params)


def test_the_grammar_and_the_parameters_come_together() -> None:
    engine = fresh(scripted=False)
    params = constrained({"regex": "a"})
    for given_params, grammar in ((params, None), (SamplingParams(), grammars().compile(params))):
        with pytest.raises(ConfigError, match="must come together"):
            engine.core.add("x", [5], given_params, 0, grammar=grammar)
    assert not engine.core.has_work
