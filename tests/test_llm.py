"""The Python API: generate, chat, stream, score, stats, and what happens when something fails."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_for_tests import (
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
from tokenizers import Tokenizer as Backend

import mmtp_jax
from mmtp_jax.config import EngineConfig
from mmtp_jax.engine import programs
from mmtp_jax.engine.buckets import buckets
from mmtp_jax.engine.driver import EngineDead
from mmtp_jax.llm import LLM
from mmtp_jax.outputs import RequestOutput
from mmtp_jax.prompts import as_batch, as_conversations, checked_ids, per_prompt
from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.sampling.state import NEUTRAL_ROW, host_row
from mmtp_jax.tokenizer import ChatTemplateError, Tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SEEDED = dataclasses.replace(GREEDY, temperature=1.0, seed=5)
FREE = dataclasses.replace(GREEDY, temperature=1.0)
LONG = dataclasses.replace(GREEDY, max_tokens=None)
TEXTS = ["hello", "the cat", "a", "what is it? 12", "x=1", "one, two, three."]


@pytest.fixture
def llm() -> Iterator[LLM]:
    """The shared engine; whatever a test does, nothing may be left on it."""
    shared = tiny_llm()
    yield shared
    assert_idle(shared)


@pytest.fixture
def slow(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The shared engine at a pace that leaves time to interrupt it."""
    step = llm.core.step

    def slow_step() -> list:
        time.sleep(0.01)
        return step()

    monkeypatch.setattr(llm.core, "step", slow_step)
    return llm


@pytest.fixture
def own() -> Iterator[LLM]:
    """An engine that a test may break."""
    with LLM.from_loaded(tiny_model()) as made:
        yield made


def tokens_of(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def in_threads[T](*calls: Callable[[], T]) -> list[T | Exception]:
    """What each call returned or raised, all of them run at the same time."""

    def attempt(call: Callable[[], T]) -> T | Exception:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(attempt, calls))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "this never happened"
        time.sleep(0.001)


# --- compilation (first: no earlier test has run anything eagerly) ---

COMPILED: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration, **_: COMPILED.append(event) if "backend_compile" in event else None
)


def test_nothing_compiles_after_start(llm: LLM) -> None:
    COMPILED.clear()
    varied = [
        GREEDY,
        FREE,
        SEEDED,
        dataclasses.replace(FREE, n=3, top_k=4, top_p=0.9, min_p=0.01),
        dataclasses.replace(GREEDY, logprobs=20, logit_bias={9: 1.0}, min_tokens=3),
        dataclasses.replace(FREE, presence_penalty=1.0, repetition_penalty=1.2, stop=["a", "bc"]),
        LONG,
    ]
    for length in (1, 2, 5, 16, 17, 40):
        llm.generate([prompt_ids(length, seed) for seed in range(len(varied))], varied)
    llm.chat([{"role": "user", "content": "hello"}], GREEDY)
    asyncio.run(collect(llm, "hello", GREEDY))
    llm.generate([prompt_ids(40, seed) for seed in range(3)], GREEDY)  # cached prefixes
    llm.stats()
    assert COMPILED == []
    jax.jit(lambda x: x * 3 + 1)(jnp.arange(7)).block_until_ready()
    assert COMPILED, "the listener hears compilations"


@pytest.mark.parametrize("k", [0, 1, 3, 8])
@pytest.mark.parametrize("num_groups", [1, 4])
def test_few_programs_by_default(k: int, num_groups: int) -> None:
    sizes = buckets(EngineConfig(), num_modules=k, width=k + 1, num_groups=num_groups)
    assert len({bucket.num_rows for bucket in sizes}) == len(sizes)
    assert len(sizes) + 2 <= 12  # admission and bias have a program each


@given(
    num_modules=st.integers(0, 8),
    max_num_seqs=st.integers(1, 9),
    spare=st.integers(0, 40),
    row_multiple=st.sampled_from([1, 2, 7, 16, 64]),
)
def test_every_program_holds_a_request(
    num_modules: int, max_num_seqs: int, spare: int, row_multiple: int
) -> None:
    width = num_modules + 1
    config = EngineConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=width + spare, row_multiple=row_multiple
    )
    for bucket in buckets(config, num_modules=num_modules, width=width, num_groups=1):
        assert bucket.num_requests >= 1 and bucket.logit_rows >= 1
        assert bucket.num_rows % row_multiple == 0 and bucket.num_rows >= num_modules


@pytest.fixture
def jax_settings(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is written to jax's configuration, instead of writing it; no cache is configured."""
    written: dict[str, Any] = {}
    fake = SimpleNamespace(jax_compilation_cache_dir=None, update=written.__setitem__)
    monkeypatch.setattr(programs.jax, "config", fake)
    return written


def test_compiled_programs_are_kept_under_a_lock(
    tmp_path: Path, jax_settings: dict[str, Any]
) -> None:
    programs.enable_compilation_cache(tmp_path / "new" / "xla")
    assert jax_settings["jax_compilation_cache_dir"] == str(tmp_path / "new" / "xla")
    assert jax_settings["jax_compilation_cache_max_size"] > 0  # without a limit jax takes no lock
    assert "jax_persistent_cache_enable_xla_caches" not in jax_settings


def test_jax_keeps_what_kernels_were_tuned_to() -> None:
    """By default, in a folder below that of the compiled programs."""
    assert jax.config.jax_persistent_cache_enable_xla_caches == (
        "xla_gpu_per_fusion_autotune_cache_dir"
    )


def test_compiled_programs_of_a_read_only_directory_are_used(
    tmp_path: Path, jax_settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs.os, "access", lambda path, mode: False)
    programs.enable_compilation_cache(tmp_path)
    assert jax_settings["jax_compilation_cache_dir"] == str(tmp_path)
    assert "jax_compilation_cache_max_size" not in jax_settings
    assert jax_settings["jax_persistent_cache_enable_xla_caches"] is None


def test_programs_need_no_directory(tmp_path: Path, jax_settings: dict[str, Any]) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="compiled programs are not kept: .*file"):
        programs.enable_compilation_cache(tmp_path / "file" / "xla")
    assert jax_settings == {}


def test_number_of_programs(llm: LLM) -> None:
    assert llm.core.device.programs.num_programs == len(llm.core.device.programs.buckets) + 4 == 5


# --- generate ---


def test_every_kind_of_prompt(llm: LLM) -> None:
    """Text and ids, alone and in lists, mixed: the same request gives the same output."""
    ids = llm.tokenizer.encode("hello")
    (single,) = llm.generate("hello", GREEDY)
    (by_ids,) = llm.generate(ids, GREEDY)
    batch = llm.generate(["hello", ids, tuple(ids)], GREEDY)
    assert [output.prompt for output in batch] == ["hello", None, None]
    for output in (by_ids, *batch):
        assert output.prompt_token_ids == tuple(ids)
        assert output.token_ids == single.token_ids and output.text == single.text
    assert single.text == llm.tokenizer.decode(single.token_ids)
    assert len(single.token_ids) == GREEDY.max_tokens and single.finished
    assert list(single.token_ids) == tiny_oracle().greedy(ids, len(single.token_ids))
    assert llm.generate([], GREEDY) == []


def test_order_and_parameters_of_a_batch(llm: LLM) -> None:
    """More prompts than slots, with their own parameters; each as if it were alone."""
    params = [
        dataclasses.replace(SEEDED, max_tokens=1 + 3 * index, seed=index)
        for index in range(len(TEXTS))
    ]
    outputs = llm.generate(TEXTS, params)
    assert [output.prompt for output in outputs] == TEXTS
    assert [len(output.token_ids) for output in outputs] == [one.max_tokens for one in params]
    for text, one, output in zip(TEXTS, params, outputs, strict=True):
        assert llm.generate(text, one)[0].token_ids == output.token_ids


def test_default_parameters(llm: LLM) -> None:
    (output,) = llm.generate("hello")
    assert 1 <= len(output.token_ids) <= SamplingParams().max_tokens


def test_samples_of_one_prompt(llm: LLM) -> None:
    params = dataclasses.replace(SEEDED, n=6)  # more than slots
    (first,), (again,) = llm.generate("hello", params), llm.generate("hello", params)
    texts = [sample.token_ids for sample in first.outputs]
    assert [sample.index for sample in first.outputs] == list(range(6))
    assert len(set(texts)) == 6
    assert texts == [sample.token_ids for sample in again.outputs]
    assert texts[0] == llm.generate("hello", SEEDED)[0].token_ids
    (greedy,) = llm.generate("hello", dataclasses.replace(GREEDY, n=3))
    assert len({sample.text for sample in greedy.outputs}) == 1
    (unseeded,) = llm.generate("hello", dataclasses.replace(FREE, n=3))
    assert len({sample.token_ids for sample in unseeded.outputs}) == 3


def test_seeds(llm: LLM) -> None:
    seeded = [dataclasses.replace(FREE, seed=seed) for seed in (1, 1, 2, -1, 2**64 - 1)]
    one, same, other, *_ = first = tokens_of(llm.generate(["hello"] * 5, seeded))
    assert one == same != other
    assert first == tokens_of(llm.generate(["hello"] * 5, seeded))
    unseeded = tokens_of(llm.generate(["hello"] * 4, FREE) + llm.generate(["hello"] * 4, FREE))
    assert len(set(unseeded)) == 8


def test_requests_leave_the_neutral_parameters_alone(llm: LLM) -> None:
    """They stand for empty slots and padding in every program, compiled or yet to be."""
    neutral = host_row(SamplingParams(temperature=0.0), 0, 0)
    llm.generate(TEXTS, dataclasses.replace(SEEDED, top_k=3, stop_token_ids=[7]))
    np.testing.assert_array_equal(NEUTRAL_ROW, neutral)


def test_the_engine_seed_makes_unseeded_requests_reproducible(own: LLM) -> None:
    with LLM.from_loaded(tiny_model()) as twin:
        assert tokens_of(own.generate(TEXTS, FREE)) == tokens_of(twin.generate(TEXTS, FREE))


def test_no_max_tokens_runs_to_the_models_limit(llm: LLM) -> None:
    for length in (1, 30, MAX_MODEL_LEN - 2, MAX_MODEL_LEN - 1):
        (output,) = llm.generate(prompt_ids(length), LONG)
        assert len(output.token_ids) == MAX_MODEL_LEN - length
        assert output.finish_reason == "length"


def test_limit_of_the_model_cuts_max_tokens(llm: LLM) -> None:
    params = dataclasses.replace(GREEDY, max_tokens=MAX_MODEL_LEN)
    (output,) = llm.generate(prompt_ids(MAX_MODEL_LEN - 5), params)
    assert (len(output.token_ids), output.finish_reason) == (5, "length")


def test_a_stop_in_one_request_leaves_the_others_alone(llm: LLM) -> None:
    """Steps in flight when a stop string is found belong to no one; the batch still completes."""
    long = dataclasses.replace(GREEDY, max_tokens=30)
    alone = [llm.generate(text, long)[0].token_ids for text in TEXTS]
    first = llm.tokenizer.decode(alone[0][3:4])
    params = [dataclasses.replace(long, stop=first), *[long] * (len(TEXTS) - 1)]
    for _ in range(5):
        outputs = llm.generate(TEXTS, params)
        assert outputs[0].finish_reason == "stop" and len(outputs[0].token_ids) <= 4
        assert tokens_of(outputs)[1:] == alone[1:]


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", GREEDY, "prompt must have at least 1 token, got 0"),
        ([[]], GREEDY, "prompt must have at least 1 token, got 0"),
        (
            prompt_ids(MAX_MODEL_LEN),
            GREEDY,
            rf"prompt has {MAX_MODEL_LEN} tokens, but max_model_len",
        ),
        ([5, VOCAB], GREEDY, rf"prompt token ids must lie in \[0, {VOCAB}\), got {VOCAB}"),
        ([-1], GREEDY, r"prompt token ids must lie in .*, got -1"),
        ([True, False], GREEDY, r"a prompt must be a string or a list of token ids, got \[True"),
        ("a", [GREEDY, GREEDY], "2 sampling_params for 1 prompts"),
        ("a", [], "0 sampling_params for 1 prompts"),
        ("a", SamplingParams(stop_token_ids=[VOCAB]), "stop_token_ids must be in"),
        ("a", SamplingParams(logit_bias={VOCAB: 1.0}), "logit_bias must be in"),
        ("a", SamplingParams(banned_token_ids=range(VOCAB)), "banned_token_ids must leave"),
    ],
)
def test_requests_that_cannot_run(llm: LLM, prompt: Any, params: Any, message: str) -> None:
    """ValueError, and not even the good requests beside the bad one were started."""
    before = llm.stats()
    with pytest.raises(ValueError, match=message):
        llm.generate(prompt, params)
    if isinstance(params, SamplingParams):
        bad = prompt if prompt == [[]] else [prompt]
        with pytest.raises(ValueError, match=message):
            llm.generate(["hello", "hello", *bad], [LONG, LONG, params])
        with pytest.raises(ValueError, match=message):
            asyncio.run(collect(llm, bad[0], params))
    assert llm.stats() == before


@pytest.mark.parametrize("prompts", [5, None, 1.5, b"abc", {"a": 1}, {5}, [1.5], [[1.5]], [5, "a"]])
def test_prompts_of_wrong_types(prompts: Any) -> None:
    with pytest.raises(ValueError, match=r"prompts? must be a string.* got "):
        as_batch(prompts)


def test_integers_of_numpy_are_token_ids() -> None:
    assert as_batch([np.int32(5), np.int64(6)]) == [[5, 6]]
    assert as_batch([list(np.arange(3)), "a"]) == [[0, 1, 2], "a"]


@pytest.mark.parametrize("params", [5, "greedy", {"temperature": 0}, [GREEDY, GREEDY]])
def test_parameters_of_a_stream_of_wrong_types(llm: LLM, params: Any) -> None:
    with pytest.raises(ValueError, match="sampling_params"):
        asyncio.run(collect(llm, "hello", params))


@pytest.mark.parametrize("text", ["\ud800", "ab\udfff"])
def test_text_that_is_not_unicode(llm: LLM, text: str) -> None:
    with pytest.raises(ValueError, match="lone surrogate"):
        llm.generate(["hello", text], GREEDY)
    with pytest.raises(ValueError, match="lone surrogate"):
        llm.chat([{"role": "user", "content": text}], GREEDY)
    with pytest.raises(ValueError, match="lone surrogate"):
        asyncio.run(collect(llm, text, GREEDY))


def test_arguments_of_wrong_types() -> None:
    with pytest.raises(ValueError, match="sampling_params must be SamplingParams"):
        per_prompt({"temperature": 0}, 1)
    with pytest.raises(ValueError, match="sampling_params must be SamplingParams"):
        per_prompt([GREEDY, None], 2)
    with pytest.raises(ValueError, match="messages must be a list of messages"):
        as_conversations("hello")
    with pytest.raises(ValueError, match="a message must be a mapping"):
        as_conversations(["hello"])
    with pytest.raises(ValueError, match="a message must be a mapping"):
        as_conversations([[{"role": "user", "content": "a"}, "b"]])
    with pytest.raises(ValueError, match="a prompt must be a string or a list of token ids"):
        checked_ids("text")
    with pytest.raises(ValueError) as error:
        checked_ids(["x"] * 10_000)
    assert len(str(error.value)) < 200


def test_cached_prefixes_are_reported_and_change_nothing(llm: LLM) -> None:
    ids = prompt_ids(40, seed=77)
    (first,), (second,) = llm.generate(ids, SEEDED), llm.generate(ids, SEEDED)
    assert first.num_cached_tokens == 0
    assert 30 <= second.num_cached_tokens < 40
    assert first.token_ids == second.token_ids


def test_calls_from_several_threads(llm: LLM) -> None:
    alone = [tokens_of(llm.generate(text, SEEDED)) for text in TEXTS]
    calls = [lambda text=text: tokens_of(llm.generate(text, SEEDED)) for text in TEXTS]
    assert in_threads(*calls, *calls) == alone + alone


def test_progress_writes_nothing_without_a_terminal(
    llm: LLM, capfd: pytest.CaptureFixture[str]
) -> None:
    llm.generate(TEXTS, GREEDY, progress=True)
    assert capfd.readouterr() == ("", "")


# --- chat ---

USER = [{"role": "user", "content": "hi"}]
TALK = [*USER, {"role": "assistant", "content": "yes?"}, {"role": "user", "content": "go"}]


def test_one_conversation(llm: LLM) -> None:
    (output,) = llm.chat(USER, GREEDY)
    ids = llm.tokenizer.chat_ids(USER)
    assert output.prompt_token_ids == tuple(ids)
    assert output.token_ids == llm.generate(ids, GREEDY)[0].token_ids


def test_several_conversations(llm: LLM) -> None:
    params = [GREEDY, SEEDED, GREEDY]
    outputs = llm.chat([USER, TALK, USER], params)
    wanted = [tuple(llm.tokenizer.chat_ids(each)) for each in (USER, TALK, USER)]
    assert [output.prompt_token_ids for output in outputs] == wanted
    assert outputs[0].token_ids == outputs[2].token_ids != outputs[1].token_ids
    assert llm.chat([], GREEDY) == []


def test_variables_of_the_template(llm: LLM) -> None:
    (output,) = llm.chat(USER, GREEDY, chat_template_kwargs={"add_generation_prompt": False})
    text = llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n"


def test_chat_without_template(llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    write_tiny_tokenizer(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(llm, "_tokenizer", Tokenizer(backend))
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        llm.chat(USER, GREEDY)


def test_without_tokenizer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "_tokenizer", None)
    for call in (lambda: llm.chat(USER), lambda: llm.generate("text"), lambda: llm.tokenizer):
        with pytest.raises(ValueError, match="this model has no tokenizer: give prompts as token"):
            call()
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        llm.generate([5, 6], dataclasses.replace(GREEDY, stop="a"))
    (output,) = llm.generate([5, 6], dataclasses.replace(GREEDY, logprobs=2))
    assert output.text == "" and list(output.token_ids) == tiny_oracle().greedy([5, 6], 12)
    stop = output.token_ids[4]
    (output,) = llm.generate([5, 6], dataclasses.replace(GREEDY, stop_token_ids=[stop]))
    assert output.token_ids[-1] == stop and output.outputs[0].stop_reason == stop


# --- stream ---


async def collect(
    llm: LLM, prompt: Any, params: SamplingParams, pause: float = 0.0
) -> list[RequestOutput]:
    outputs = []
    async for output in llm.stream(prompt, params):
        outputs.append(output)
        await asyncio.sleep(pause)
    return outputs


def assert_stream(streamed: list[RequestOutput], whole: RequestOutput) -> None:
    """A stream of growing outputs whose pieces make up what `generate` returned."""
    assert [output.finished for output in streamed] == [False] * (len(streamed) - 1) + [True]
    for index, final in enumerate(whole.outputs):
        samples = [output.outputs[index] for output in streamed]
        assert samples[-1].token_ids == final.token_ids and samples[-1].text == final.text
        assert samples[-1].finish_reason == final.finish_reason
        assert "".join(sample.new_text for sample in samples) == final.text
        assert sum((sample.new_token_ids for sample in samples), ()) == final.token_ids
        for sample in samples:
            assert final.text.startswith(sample.text)
            assert final.token_ids[: len(sample.token_ids)] == sample.token_ids
            accepted = sum(sample.acceptance.accepted)
            assert len(sample.token_ids) == sample.num_steps + accepted
            if sample.logprobs is not None:
                assert len(sample.logprobs) == len(sample.token_ids)


@pytest.mark.parametrize("pause", [0.0, 0.02])
def test_stream(llm: LLM, pause: float) -> None:
    """Also to a reader slower than the engine, who gets several steps at once."""
    params = dataclasses.replace(SEEDED, max_tokens=20, logprobs=1)
    streamed = asyncio.run(collect(llm, "hello", params, pause))
    assert len(streamed) > 1 or pause
    assert_stream(streamed, llm.generate("hello", params)[0])


@pytest.mark.parametrize("pause", [0.0, 0.005])
def test_stream_of_several_samples(llm: LLM, pause: float) -> None:
    params = dataclasses.replace(SEEDED, n=6)
    streamed = asyncio.run(collect(llm, "hello", params, pause))
    assert_stream(streamed, llm.generate("hello", params)[0])


@pytest.mark.parametrize("included", [False, True])
def test_stream_holds_back_what_may_become_a_stop_string(llm: LLM, included: bool) -> None:
    params = dataclasses.replace(SEEDED, max_tokens=30, banned_token_ids=range(5))
    text = llm.generate("hello", params)[0].text
    stop = [text[17:22], text[9:11] + "\n\n", "\n\n\n"]
    params = dataclasses.replace(params, stop=stop, include_stop_str_in_output=included)
    streamed = asyncio.run(collect(llm, "hello", params))
    assert streamed[-1].text == text[: 22 if included else 17]
    assert streamed[-1].outputs[0].stop_reason == stop[0]
    for output in streamed[:-1]:
        assert not any(output.text.endswith(one[0]) for one in (stop[0], stop[2]))
    assert_stream(streamed, llm.generate("hello", params)[0])


def test_two_streams_at_once(llm: LLM) -> None:
    async def both() -> list[list[RequestOutput]]:
        return await asyncio.gather(collect(llm, TEXTS[0], LONG), collect(llm, TEXTS[1], SEEDED))

    for streamed, whole in zip(
        asyncio.run(both()), llm.generate(TEXTS[:2], [LONG, SEEDED]), strict=True
    ):
        assert_stream(streamed, whole)


def test_leaving_a_stream_ends_its_request(slow: LLM) -> None:
    async def leave() -> None:
        async with aclosing(slow.stream("hello", dataclasses.replace(LONG, n=2))) as stream:
            async for output in stream:
                assert not output.finished
                assert slow.stats()["requests_running"] == 2
                break
        assert_idle(slow)

    asyncio.run(leave())


def test_cancelling_a_stream_ends_its_request(slow: LLM) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(collect(slow, "hello", LONG))
        while slow.stats()["requests_running"] == 0:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert_idle(slow)

    asyncio.run(cancel())


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_cancelling_a_stream_that_is_about_to_start(slow: LLM, turns: int) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(collect(slow, "hello", LONG))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert_idle(slow)

    asyncio.run(cancel())
    assert tokens_of(slow.generate("a", GREEDY))  # the engine goes on


def test_a_loop_that_closed_does_not_harm_the_engine(slow: LLM) -> None:
    """A stream whose loop is gone: the engine's next delta for it has nowhere to go."""
    loop = asyncio.new_event_loop()
    stream = slow.stream("hello", dataclasses.replace(LONG, max_tokens=40))
    loop.run_until_complete(anext(stream))
    loop.close()
    assert tokens_of(slow.generate("a", GREEDY)) == tokens_of(slow.generate("a", GREEDY))
    wait_until(lambda: slow.stats()["requests_running"] == 0)


# --- the engine's end ---


def test_a_failing_step_reaches_everyone(own: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, broken = own.core.step, RuntimeError("the device is gone")

    def failing_step() -> list:
        if own.core.stats.steps >= 6 and len(own.core.scheduler.running) == 3:
            raise broken
        time.sleep(0.005)
        return step()

    monkeypatch.setattr(own.core, "step", failing_step)
    errors = in_threads(
        lambda: own.generate("hello", LONG),
        lambda: asyncio.run(collect(own, "the cat", LONG)),
        lambda: own.generate("a", LONG),
    )
    for error in errors:
        assert isinstance(error, EngineDead) and error.__cause__ is broken
    for call in (
        lambda: own.generate("hello", GREEDY),
        lambda: asyncio.run(collect(own, "hello", GREEDY)),
        lambda: own.score([5, 6]),
        own.stats,
    ):
        with pytest.raises(EngineDead) as error:
            call()
        assert error.value.__cause__ is broken
    own.close()


def test_close(own: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = own.core.step
    monkeypatch.setattr(own.core, "step", lambda: (time.sleep(0.01), step())[1])

    def close() -> None:
        wait_until(lambda: own.stats()["requests_running"] == 3)
        own.close()

    first, second, _ = in_threads(
        lambda: own.generate(["hello", "a"], LONG),
        lambda: asyncio.run(collect(own, "the cat", LONG)),
        close,
    )
    for error in (first, second):
        assert isinstance(error, EngineDead) and error.__cause__ is None
    with pytest.raises(EngineDead):
        own.generate("hello", GREEDY)
    own.close()
    assert not own._driver._thread.is_alive()


def test_an_engine_that_nobody_holds_stops() -> None:
    llm = LLM.from_loaded(tiny_model())
    assert llm.generate("hello", GREEDY)[0].finished
    thread = llm._driver._thread
    assert thread.is_alive()
    del llm
    gc.collect()
    assert not thread.is_alive()


EXIT = """
import threading
from llm_for_tests import LLM, tiny_model
from mmtp_jax import SamplingParams
llm = LLM.from_loaded(tiny_model())
params = SamplingParams(max_tokens=None, ignore_eos=True)
def generate():
    try:
        while True:
            llm.generate(["hello"] * 8, params)
    except RuntimeError:
        pass  # the engine has stopped
threading.Thread(target=generate, daemon=True).start()
while llm.stats()["tokens"] < 100:
    pass
"""


def test_exit_while_requests_run() -> None:
    paths = [str(Path(__file__).parent), str(Path(mmtp_jax.__file__).parents[1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    run = subprocess.run(
        [sys.executable, "-c", EXIT], env=environment, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")


# --- score ---


MAX_CHUNK = 1000
"""The most rows of a prefill chunk in the engines for scoring."""


@cache
def scoring_llm(budget: int) -> LLM:
    """An engine whose bucket holds `budget` rows, over a directory without a tokenizer."""
    loaded = load_tiny(
        {}, tokenizer=False, max_num_batched_tokens=budget, row_multiple=max(budget, 16)
    )
    assert loaded.tokenizer is None
    return LLM.from_loaded(loaded, chunk_policy=lambda request, limit: min(limit, MAX_CHUNK))


def assert_scores(scores: dict[str, np.ndarray], ids: list[int], modules: int = MODULES) -> None:
    """Every row that can be known, within float32 of the float64 oracle; the others are NaN."""
    trace, length = tiny_oracle().trace(ids), len(ids)
    assert scores.keys() == {"logits", "mtp_logits"}
    assert scores["logits"].shape == (length, VOCAB)
    assert scores["mtp_logits"].shape == (modules, length, VOCAB)
    assert scores["logits"].dtype == scores["mtp_logits"].dtype == np.float32
    assert_close(scores["logits"], trace.logits)
    for module, got in enumerate(scores["mtp_logits"]):
        valid = max(length - 1 - module, 0)  # rows t <= T - 2 - m
        if valid:
            assert_close(got[:valid], trace.modules[module].logits)
        assert np.isnan(got[valid:]).all()


def assert_close(got: np.ndarray, want: np.ndarray) -> None:
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max()


@pytest.mark.parametrize("length", [1, 2, MODULES + 1, 40])
@pytest.mark.parametrize(
    ("budget", "chunk"), [(4, 1000), (48, 1), (48, 2), (48, 3), (48, 7), (48, 1000)]
)
def test_scores_equal_the_oracle(
    budget: int, chunk: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "MAX_CHUNK", chunk)
    llm = scoring_llm(budget)
    ids = prompt_ids(length, seed=3)
    assert_scores(llm.score(ids), ids)
    assert_idle(llm)


def test_scores_after_other_requests_filled_the_cache() -> None:
    """A prefix that is cached has no logits any more: scoring computes it once again."""
    llm = scoring_llm(48)
    ids = prompt_ids(40, seed=4)
    before = tokens_of(llm.generate([ids, ids[:20], ids], SEEDED))
    assert llm.generate(ids, SEEDED)[0].num_cached_tokens > 0
    assert_scores(llm.score(ids), ids)
    assert_scores(llm.score(ids), ids)
    assert tokens_of(llm.generate([ids, ids[:20], ids], SEEDED)) == before


def test_scores_beside_other_requests() -> None:
    llm = scoring_llm(48)
    alone = tokens_of(llm.generate(prompt_ids(9), LONG))
    texts = [prompt_ids(length, seed=length) for length in (33, 12, 1)]
    running, *scores = in_threads(
        lambda: tokens_of(llm.generate([prompt_ids(9)] * 3, LONG)),
        *[lambda ids=ids: llm.score(ids) for ids in texts],
    )
    assert running == alone * 3
    for ids, each in zip(texts, scores, strict=True):
        assert isinstance(each, dict)
        assert_scores(each, ids)
    assert_idle(llm)


def test_scores_without_modules() -> None:
    llm, ids = tiny_llm(0), prompt_ids(20)
    assert_scores(llm.score(ids), ids, modules=0)


def test_scores_of_the_longest_text() -> None:
    llm = scoring_llm(48)
    ids = prompt_ids(MAX_MODEL_LEN - 1)
    assert_scores(llm.score(ids), ids)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "at least 1 token"),
        (prompt_ids(MAX_MODEL_LEN), "max_model_len"),
        ([5, VOCAB], "prompt token ids must lie in"),
        ([True], "a list of token ids"),
    ],
)
def test_texts_that_cannot_be_scored(llm: LLM, ids: list[int], message: str) -> None:
    before = llm.stats()
    with pytest.raises(ValueError, match=message):
        llm.score(ids)
    assert llm.stats() == before


# --- stats ---


def test_stats(own: LLM) -> None:
    empty = own.stats()
    assert empty["steps"] == empty["tokens"] == empty["preemptions"] == 0
    assert empty["tokens_per_step"] == 0 and empty["acceptance_by_position"] == [0.0] * MODULES
    assert [group["total"] for group in empty["pages"]] == [127, 127]  # target and modules
    outputs = own.generate(TEXTS, LONG)
    stats = own.stats()
    assert stats["tokens"] == sum(len(output.token_ids) for output in outputs)
    for name in ("drafted", "accepted"):
        by_request = [getattr(output.acceptance, name) for output in outputs]
        counts = stats[f"{name}_by_position"]
        assert counts == np.sum(by_request, axis=0).tolist()
        assert counts == sorted(counts, reverse=True)
    steps = sum(output.outputs[0].num_steps for output in outputs)
    assert stats["tokens"] == steps + sum(stats["accepted_by_position"])
    assert stats["tokens_per_step"] == pytest.approx(stats["tokens"] / steps)
    assert stats["tokens_per_step"] > 1
    rates = zip(stats["accepted_by_position"], stats["drafted_by_position"], strict=True)
    assert stats["acceptance_by_position"] == [a / d for a, d in rates]
    assert 0 < stats["steps"] <= steps + 2 * len(TEXTS)
    assert_idle(own)


def test_stats_while_requests_run(slow: LLM) -> None:
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(slow.generate, [prompt_ids(8, seed) for seed in range(6)], LONG)
        wait_until(lambda: slow.stats()["requests_running"] == 4)
        stats = slow.stats()
        assert stats["requests_waiting"] == 2
        assert all(group["referenced"] > 0 for group in stats["pages"])
        assert all(
            group["referenced"] + group["free"] == group["total"] for group in stats["pages"]
        )
        future.result()


# --- the package ---


def test_public_names() -> None:
    for name in mmtp_jax.__all__:
        assert getattr(mmtp_jax, name).__name__ == name
    assert mmtp_jax.LLM is LLM
    with pytest.raises(AttributeError, match="no attribute 'Lm'"):
        mmtp_jax.Lm  # noqa: B018
