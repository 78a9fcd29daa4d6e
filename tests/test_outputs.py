"""What users see: stops, held-back text, accounting, and the same outputs whatever was drafted.

The same requests run without speculation, with random modules, and with drafts forced to be right
(or wrong now and then), so that stops fall inside runs of accepted drafts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from llm_for_tests import (
    EOS,
    MAX_MODEL_LEN,
    MODULES,
    VOCAB,
    assert_idle,
    load_tiny,
    prompt_ids,
    tiny_llm,
    tiny_model,
    tiny_oracle,
)
from models_for_tests import write_tiny_tokenizer

from mmtp_jax.engine.delta import TokenDelta, TokenLogprobs
from mmtp_jax.llm import LLM
from mmtp_jax.outputs import CompletionOutput, RequestOutput, Sample
from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.tokenizer import Tokenizer, load_tokenizer

# --- one sample, fed by hand ---


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token per character."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    loaded = load_tokenizer(folder)
    assert loaded is not None
    return loaded


def feed(
    tokenizer: Tokenizer | None,
    params: SamplingParams,
    tokens: Sequence[int],
    finish: str,
    cuts: Sequence[int] = (),
) -> tuple[Sample, list[CompletionOutput]]:
    """Give a sample its tokens in steps of `cuts` tokens (then one by one), drafts always right.

    The engine ends the request with reason `finish` at the last token. Returns the sample and its
    output after every step.
    """
    sample = Sample(0, params, tokenizer, (EOS,), MODULES)
    outputs, start = [], 0
    sizes = iter(cuts)
    while start < len(tokens) and sample.finish_reason is None:
        end = min(start + next(sizes, 1), len(tokens))
        last = end == len(tokens)
        accepted = end - start - 1
        delta = TokenDelta(
            request_id="0",
            token_ids=tuple(tokens[start:end]),
            drafted=accepted if last and finish == "stop" else MODULES,
            accepted=accepted,
            num_cached_tokens=0,
            finish_reason=finish if last else None,  # type: ignore[arg-type]
            logprobs=tuple(TokenLogprobs(-float(i), (), ()) for i in range(start, end)),
        )
        told = sample.take(delta)
        outputs.append(sample.output())
        # The engine has to be told exactly if it would go on.
        assert told == (sample.finish_reason is not None and not last)
        start = end
    return sample, outputs


def earliest_stop(text: str, stops: Sequence[str], first: int) -> tuple[int, str] | None:
    """The stop string that is complete first (of several, the longest) and where it begins."""
    found = [
        (end, start, text[start:end])
        for end in range(len(text) + 1)
        for start in range(first, end)
        if text[start:end] in stops
    ]
    return (min(found)[1], min(found)[2]) if found else None


@given(data=st.data())
def test_stop_strings_end_at_the_same_character_however_tokens_arrive(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    text = data.draw(st.text("abc", min_size=1, max_size=20))
    stops = data.draw(st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
    finish = data.draw(st.sampled_from(["length", "stop"]))
    params = SamplingParams(
        max_tokens=30,
        min_tokens=data.draw(st.integers(0, 6)),
        stop=stops,
        include_stop_str_in_output=data.draw(st.booleans()),
        logprobs=0,
    )
    tokens = tokenizer.encode(text) + [EOS] * (finish == "stop")
    cuts = data.draw(st.lists(st.integers(1, MODULES + 1), max_size=20))
    sample, outputs = feed(tokenizer, params, tokens, finish, cuts)
    final = outputs[-1]

    stop = earliest_stop(text, stops, params.min_tokens)
    if stop is None:
        assert (final.text, list(final.token_ids)) == (text, tokens)
        assert (final.finish_reason, final.stop_reason) == (finish, None)
    else:
        start, string = stop
        end = start + len(string)
        assert final.text == text[: end if params.include_stop_str_in_output else start]
        assert list(final.token_ids) == tokens[:end]
        assert (final.finish_reason, final.stop_reason) == ("stop", string)

    for output in outputs:
        assert final.text.startswith(output.text)
        assert (output.finish_reason is None) == (output is not final)
    assert "".join(output.new_text for output in outputs) == final.text
    assert sum((output.new_token_ids for output in outputs), ()) == final.token_ids
    assert [one.chosen for one in final.logprobs or ()] == [-i for i in range(len(tokens))][
        : len(final.token_ids)
    ]
    assert sample.output().new_text == "" and sample.output().new_token_ids == ()

    # Each step emits its accepted drafts and one more token; those past the end never count.
    counts = final.acceptance
    assert len(final.token_ids) == final.num_steps + sum(counts.accepted)
    assert len(final.token_ids) == sum(final.step_sizes)
    ended_by_stop = final.finish_reason == "stop"
    steps_with_all_drafts = final.num_steps - ended_by_stop
    assert sum(counts.drafted) - sum(counts.accepted) <= MODULES * steps_with_all_drafts
    assert counts.drafted[0] - steps_with_all_drafts in ((0, 1) if ended_by_stop else (0,))
    assert counts.drafted == sorted(counts.drafted, reverse=True)
    assert counts.accepted == sorted(counts.accepted, reverse=True)


@given(data=st.data())
def test_pieces_of_increments_join_to_the_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(st.text("abcé€", max_size=12))
    # Characters outside the vocabulary are tokens of no text: pieces may be empty.
    finish = data.draw(st.sampled_from(["length", "stop"]))
    tokens = tokenizer.encode(text) + [EOS] * (finish == "stop")
    assume(tokens)
    params = SamplingParams(
        stop=data.draw(st.lists(st.text("abc", min_size=1, max_size=3), max_size=3)),
        stop_token_ids=data.draw(st.sampled_from([(), (EOS,)])),
        ignore_eos=data.draw(st.booleans()),
        include_stop_str_in_output=data.draw(st.booleans()),
        logprobs=0,
    )
    sample = Sample(0, params, tokenizer, (EOS,), MODULES)
    increments, start = [], 0
    while sample.finish_reason is None:
        end = min(start + data.draw(st.integers(1, MODULES + 1)), len(tokens))
        sample.take(
            TokenDelta(
                request_id="0",
                token_ids=tuple(tokens[start:end]),
                drafted=MODULES,
                accepted=end - start - 1,
                num_cached_tokens=0,
                finish_reason=finish if end == len(tokens) else None,  # type: ignore[arg-type]
                logprobs=tuple(TokenLogprobs(-float(i), (), ()) for i in range(start, end)),
            )
        )
        start = end
        if data.draw(st.booleans()) or sample.finish_reason is not None:
            increments.append(sample.increment())
    assert "".join(one.text for one in increments) == sample.text
    for one in increments:
        assert "".join(one.pieces) == one.text
        assert len(one.pieces) == len(one.token_ids) == len(one.logprobs)
    ids = [token for one in increments for token in one.token_ids]
    assert ids == sample.token_ids[: len(ids)]
    assert [one.chosen for each in increments for one in each.logprobs] == [
        -i for i in range(len(ids))
    ]
    # Only tokens that stand for no text of the answer are left out: a stop, or its string.
    if sample.finish_reason == "length":
        assert ids == sample.token_ids
    shown = "".join(tokenizer.decode([token]) for token in ids)
    assert shown.startswith(sample.text)
    if params.include_stop_str_in_output or not params.stop:
        assert len(sample.token_ids) - len(ids) <= 1


def test_drafts_past_a_stop_string_do_not_count_when_a_stop_token_follows(
    tokenizer: Tokenizer,
) -> None:
    """Both ends fall into one step: the string comes first and decides."""
    params = SamplingParams(stop="b", max_tokens=30)
    tokens = [*tokenizer.encode("aba"), EOS]
    _, outputs = feed(tokenizer, params, tokens, "stop", [4])
    (output,) = outputs
    assert (output.text, output.stop_reason, output.finish_reason) == ("a", "b", "stop")
    assert (output.acceptance.drafted, output.acceptance.accepted) == ([1, 0, 0], [1, 0, 0])
    assert output.step_sizes == (2,)


@pytest.mark.parametrize("with_tokenizer", [True, False])
@pytest.mark.parametrize(
    ("token", "changes", "reason", "text"),
    [
        (EOS, {}, None, "ab"),
        (EOS, {"include_stop_str_in_output": True}, None, "ab"),
        (EOS, {"stop_token_ids": [EOS]}, None, "ab"),
        (EOS, {"stop_token_ids": [EOS], "ignore_eos": True}, EOS, "ab"),
        (7, {"stop_token_ids": [7]}, 7, "ab"),
        (7, {"stop_token_ids": [7], "include_stop_str_in_output": True}, 7, "abc"),
    ],
)
def test_stop_tokens(
    tokenizer: Tokenizer,
    token: int,
    changes: dict,
    reason: int | None,
    text: str,
    with_tokenizer: bool,
) -> None:
    assert tokenizer.encode("abc") == [5, 6, 7]
    used = tokenizer if with_tokenizer else None
    _, outputs = feed(used, SamplingParams(**changes), [5, 6, token], "stop", [3])
    (output,) = outputs
    assert (output.finish_reason, output.stop_reason) == ("stop", reason)
    assert output.text == (text if with_tokenizer else "")
    assert output.token_ids == (5, 6, token)


def test_skip_special_tokens(tokenizer: Tokenizer) -> None:
    for skip, text in ((True, "ab"), (False, "a<|im_end|>b")):
        params = SamplingParams(skip_special_tokens=skip)
        _, outputs = feed(tokenizer, params, [5, 4, 6], "length")
        assert outputs[-1].text == text


def test_outputs_are_snapshots(tokenizer: Tokenizer) -> None:
    _, outputs = feed(tokenizer, SamplingParams(), [5, 6, 7, 8], "length", [2, 1, 1])
    assert [output.acceptance.accepted[0] for output in outputs] == [1, 1, 1]
    assert [output.acceptance.drafted[0] for output in outputs] == [1, 2, 3]
    assert [len(output.token_ids) for output in outputs] == [2, 3, 4]


def test_request_output_shows_its_first_sample(tokenizer: Tokenizer) -> None:
    _, first = feed(tokenizer, SamplingParams(), [5, 6], "length", [2])
    _, second = feed(tokenizer, SamplingParams(), [7, 8], "length")
    done = RequestOutput("p", (9,), (first[-1], second[-1]), 0)
    assert (done.text, done.token_ids, done.finish_reason) == ("ab", (5, 6), "length")
    assert done.acceptance == first[-1].acceptance and done.logprobs == first[-1].logprobs
    assert done.finished and not RequestOutput("p", (9,), (first[-1], second[0]), 0).finished
    assert (first[-1].tokens_per_step, second[-1].tokens_per_step) == (2.0, 1.0)


# --- the same requests with and without speculation ---


@dataclass(frozen=True)
class Case:
    """A request; its stops are taken from the text it has without any.

    `stop_at`: the characters that become the stop string. `stop_token_at`: the token that becomes a
    stop id. `wrong_every`: the distance of the tokens for which drafts are forced to be wrong.
    """

    params: SamplingParams
    stop_at: slice | None = None
    stop_token_at: int | None = None
    wrong_every: int | None = None


def case(
    stop_at: slice | None = None,
    stop_token_at: int | None = None,
    wrong_every: int | None = None,
    **params: object,
) -> Case:
    chosen = {"max_tokens": 24, "ignore_eos": True, "logprobs": 5} | params
    return Case(SamplingParams(**chosen), stop_at, stop_token_at, wrong_every)  # type: ignore[arg-type]


GREEDY = {"temperature": 0.0}
SPELLED = {"banned_token_ids": range(5)}  # no special tokens: one character per token
CASES = {
    "greedy": case(**GREEDY),
    "seeded": case(seed=1),
    "cold": case(seed=2, temperature=0.3),
    "top-k": case(seed=3, top_k=5),
    "top-p": case(seed=4, top_p=0.7),
    "min-p": case(seed=5, min_p=0.2),
    "presence": case(**GREEDY, presence_penalty=1.5),
    "frequency": case(**GREEDY, frequency_penalty=0.8),
    "repetition": case(**GREEDY, repetition_penalty=1.7),
    "negative penalties": case(seed=6, presence_penalty=-1.0, frequency_penalty=-0.5),
    "logit bias": case(seed=7, logit_bias={10: 2.0, 11: 3.0, 12: -50.0}),
    "allowed": case(seed=8, allowed_token_ids=range(20, 30)),
    "banned": case(**GREEDY, banned_token_ids=range(5, 40)),
    "no logprobs": case(seed=9, logprobs=None),
    "chosen logprobs": case(seed=10, logprobs=0),
    "all logprobs": case(seed=11, logprobs=20),
    "one token": case(seed=12, max_tokens=1),
    "two tokens": case(seed=13, max_tokens=2),
    "three tokens": case(**GREEDY, max_tokens=3),
    "four tokens": case(**GREEDY, max_tokens=4),
    "model's limit": case(seed=14, max_tokens=None),
    "stop string": case(seed=15, stop_at=slice(8, 11), **SPELLED),
    "stop string included": case(
        seed=16, stop_at=slice(10, 13), **SPELLED, include_stop_str_in_output=True
    ),
    "stop character": case(seed=17, stop_at=slice(9, 10), **SPELLED),
    "stop string after a minimum": case(seed=18, stop_at=slice(9, 10), **SPELLED, min_tokens=8),
    "stop at the limit": case(seed=19, stop_at=slice(22, 24), **SPELLED),
    "stop token": case(seed=20, stop_token_at=6),
    "stop token at once": case(seed=21, stop_token_at=0),
    "stop token included": case(seed=22, stop_token_at=9, include_stop_str_in_output=True),
    "end of sequence": case(seed=23, ignore_eos=False, logit_bias={EOS: 6.0}),
    "end of sequence ignored": case(seed=24, logit_bias={EOS: 6.0}),
    "end of sequence banned at first": case(
        seed=25, ignore_eos=False, logit_bias={EOS: 20.0}, min_tokens=7
    ),
    "special tokens": case(seed=26, logit_bias={3: 4.0}, skip_special_tokens=False),
    "drafts sometimes wrong": case(seed=27, max_tokens=40, wrong_every=3),
    "drafts rarely wrong": case(seed=28, max_tokens=40, wrong_every=7),
    "stop string, drafts wrong": case(seed=29, stop_at=slice(12, 15), **SPELLED, wrong_every=5),
    "everything": case(
        seed=30,
        temperature=0.8,
        top_k=20,
        top_p=0.9,
        min_p=0.02,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={9: 1.0},
        banned_token_ids=[*range(5), 8],
        stop_at=slice(14, 17),
        min_tokens=5,
    ),
}
PROMPTS = {
    # The first token says which case it is, so that a table can give the drafts.
    name: [5 + index, *prompt_ids(1 + index % 7, seed=index)]
    for index, name in enumerate(CASES)
}


@cache
def unstopped() -> dict[str, RequestOutput]:
    """Every case without its stops and without speculation."""
    params = [
        dataclasses.replace(
            one.params,
            ignore_eos=True,
            min_tokens=0,
            max_tokens=one.params.max_tokens and one.params.max_tokens + MODULES + 1,
        )
        for one in CASES.values()
    ]
    return dict(zip(CASES, tiny_llm(0).generate(list(PROMPTS.values()), params), strict=True))


@cache
def requests() -> dict[str, SamplingParams]:
    """Every case with its stops."""
    made = {}
    for name, one in CASES.items():
        params, free = one.params, unstopped()[name]
        if one.stop_at is not None:
            params = dataclasses.replace(params, stop=free.text[one.stop_at])
        if one.stop_token_at is not None:
            stop = free.token_ids[one.stop_token_at]
            params = dataclasses.replace(params, stop_token_ids=[stop])
        made[name] = params
    return made


def run(llm: LLM) -> dict[str, RequestOutput]:
    outputs = llm.generate(list(PROMPTS.values()), list(requests().values()))
    assert_idle(llm)
    return dict(zip(CASES, outputs, strict=True))


@cache
def plain() -> dict[str, RequestOutput]:
    return run(tiny_llm(0))


@cache
def drafted() -> dict[str, RequestOutput]:
    """Drafts of the random modules."""
    return run(tiny_llm())


@cache
def forced(auto: bool = False) -> dict[str, RequestOutput]:
    """Drafts from a table of the known texts, which go on past the stops; with `auto` so many as
    the engine chooses."""
    table = np.zeros((VOCAB, MAX_MODEL_LEN + MODULES), np.int32)
    for name, one in CASES.items():
        prompt, stopped = PROMPTS[name], plain()[name].token_ids
        text = [*prompt, *stopped, *unstopped()[name].token_ids[len(stopped) :]]
        row = table[prompt[0]]
        row[: len(text)] = text
        if one.wrong_every is not None:
            row[len(prompt) :: one.wrong_every] += 1

    def choose(logits, sampling, slot, index, history):
        first = history.at[slot, 0].get(mode="clip")
        return jnp.asarray(table)[first, index] % VOCAB

    loaded = load_tiny({"num_speculative_tokens": "auto"}) if auto else tiny_model()
    with LLM.from_loaded(loaded, choose_draft=choose) as llm:
        outputs = run(llm)
        stats = llm.stats()
    emitted = sum(len(output.token_ids) for output in outputs.values())
    assert stats["tokens"] >= emitted  # text past a stop string is emitted and dropped
    accepted = stats["accepted_by_position"]
    assert accepted == sorted(accepted, reverse=True) and (accepted[-1] > 0 or auto)
    return outputs


def assert_same(one: RequestOutput, other: RequestOutput) -> None:
    assert one.prompt_token_ids == other.prompt_token_ids
    first, second = one.outputs[0], other.outputs[0]
    assert first.token_ids == second.token_ids
    assert first.text == second.text
    assert (first.finish_reason, first.stop_reason) == (second.finish_reason, second.stop_reason)
    assert (first.logprobs is None) == (second.logprobs is None)
    for left, right in zip(first.logprobs or (), second.logprobs or (), strict=True):
        assert left.top_ids == right.top_ids
        assert left.chosen == pytest.approx(right.chosen, abs=1e-4)
        assert left.top_values == pytest.approx(right.top_values, abs=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_speculation_changes_nothing(name: str) -> None:
    assert_same(plain()[name], drafted()[name])
    assert_same(plain()[name], forced()[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_varying_draft_lengths_change_nothing(name: str) -> None:
    assert_same(plain()[name], forced(auto=True)[name])


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_what_it_says(name: str) -> None:
    """The texts that the comparisons are about end where and why they should."""
    one, params, free = CASES[name], requests()[name], unstopped()[name]
    output = plain()[name].outputs[0]
    prompt, tokens = PROMPTS[name], output.token_ids
    assert output.acceptance.drafted == [] and output.num_steps == len(tokens)
    assert (output.logprobs is None) == (params.logprobs is None)
    limit = MAX_MODEL_LEN - len(prompt) if params.max_tokens is None else params.max_tokens
    assert len(tokens) <= limit
    if one.stop_at is not None:
        assert output.finish_reason == "stop" and output.stop_reason == free.text[one.stop_at]
        kept = params.include_stop_str_in_output
        assert output.text.endswith(str(output.stop_reason)) == kept
        assert params.min_tokens < len(tokens) <= one.stop_at.stop
        assert free.token_ids[: len(tokens)] == tokens
    elif one.stop_token_at is not None:
        assert (output.finish_reason, output.stop_reason) == ("stop", tokens[-1])
        assert params.min_tokens < len(tokens) <= one.stop_token_at + 1
        assert free.token_ids[: len(tokens)] == tokens
    elif not params.ignore_eos:
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
        assert tokens[-1] == EOS and EOS not in tokens[:-1]
        assert params.min_tokens < len(tokens) < limit
    else:
        assert (output.finish_reason, output.stop_reason) == ("length", None)
        assert len(tokens) == limit
        assert free.token_ids[:limit] == tokens
    if name == "end of sequence ignored":
        assert EOS in tokens
    if name == "special tokens":
        assert "<|im_start|>" in output.text


@pytest.mark.parametrize("name", CASES)
def test_accounting(name: str) -> None:
    """A step emits its accepted drafts and one token more, and no draft counts past the end."""
    for outputs in (drafted(), forced()):
        output = outputs[name].outputs[0]
        counts = output.acceptance
        assert len(output.token_ids) == output.num_steps + sum(counts.accepted)
        assert counts.drafted == sorted(counts.drafted, reverse=True)
        assert counts.accepted == sorted(counts.accepted, reverse=True)
        assert all(a <= d for a, d in zip(counts.accepted, counts.drafted, strict=True))
    counts = forced()[name].acceptance
    if CASES[name].wrong_every is None:
        # Also where a stop ended the text: what was drafted for positions past it is not counted.
        assert counts.accepted == counts.drafted
        if len(output.token_ids) > MODULES + 1:
            assert counts.accepted[-1] > 0
    else:
        assert 0 < sum(counts.accepted) < sum(counts.drafted)


@pytest.mark.parametrize("name", ["greedy", "seeded", "repetition", "banned", "model's limit"])
def test_logprobs_are_those_of_the_raw_logits(name: str) -> None:
    """Penalties, temperature and bans do not show; the oracle computes in float64."""
    for outputs in (plain(), forced()):
        output = outputs[name]
        prompt, tokens = PROMPTS[name], output.token_ids
        logits = tiny_oracle().trace([*prompt, *tokens]).logits[len(prompt) - 1 : -1]
        shifted = logits - logits.max(axis=1, keepdims=True)
        values = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        assert output.logprobs is not None and len(output.logprobs) == len(tokens)
        for row, token, got in zip(values, tokens, output.logprobs, strict=True):
            assert got.chosen == pytest.approx(row[token], abs=1e-4)
            best = np.argsort(-row)[: len(got.top_ids)]
            assert got.top_ids == tuple(best) and len(best) == 5
            assert got.top_values == pytest.approx(row[best], abs=1e-4)
            assert list(got.top_values) == sorted(got.top_values, reverse=True)


def test_number_of_logprobs() -> None:
    for name, count in (("chosen logprobs", 0), ("greedy", 5), ("all logprobs", 20)):
        for logprobs in forced()[name].logprobs or ():
            assert len(logprobs.top_ids) == len(logprobs.top_values) == count
            assert logprobs.chosen <= 0
