"""Drawing training data: which samples, equal to the engine's own answers, shard by shard."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from llm_for_tests import EOS, OPTIONS, PLAIN, load_tiny, tiny_model
from models_for_tests import write_tiny_llama

from mmtp_jax.config import ConfigError, engine_config
from mmtp_jax.engine.core import EngineCore
from mmtp_jax.llm import LLM
from mmtp_jax.loader import LoadedModel, load_model
from mmtp_jax.prompts import Messages
from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.train.__main__ import main
from mmtp_jax.train.generate import generate
from mmtp_jax.train.samples import GenerateOptions, SamplePlan
from mmtp_jax.train.shards import Dataset
from mmtp_jax.weights.errors import ModelError

TEXTS = ["hello", "the cat", "what is it? 12", "x=1", "a", "far too long for it " * 3]
PROMPTS: list[Messages] = [[{"role": "user", "content": text}] for text in TEXTS]
SHORT = len(PROMPTS) - 1
DRAWN = GenerateOptions(
    temperatures=(0.0, 0.7, 2.0),
    samples=2,
    max_tokens=20,
    max_prompt_len=50,
    shard_size=10,
    seed=3,
)
VARIANTS = 5
"""Samples of one prompt: a greedy one and two of each temperature above 0."""


@cache
def tiny_llama() -> LoadedModel:
    """A tiny model without modules, its logits independent of the batch."""
    with TemporaryDirectory() as folder:
        path = write_tiny_llama(Path(folder), tokenizer=True, num_hidden_layers=1)
        return load_model(engine_config(str(path), PLAIN, **OPTIONS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of all prompts."""
    path = tmp_path_factory.mktemp("train") / "data"
    done = generate(tiny_llama(), PROMPTS, path, DRAWN)
    assert dataclasses.asdict(done) == {
        "samples": SHORT * VARIANTS,
        "tokens": int((Dataset.open(path).lengths - Dataset.open(path).prompt_lengths).sum()),
        "shards_written": 3,
        "shards_found": 0,
        "prompts_skipped": 1,
    }
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_sample_is_the_answer_of_chat(folder: Path) -> None:
    loaded, data, plan = tiny_llama(), Dataset.open(folder), SamplePlan(SHORT, DRAWN)
    assert len(data) == plan.num_samples == SHORT * VARIANTS
    numbers = np.concatenate([plan.shard(index) for index in range(plan.num_shards)]).tolist()
    assert sorted(numbers) == list(range(len(data))) and numbers != sorted(numbers)
    variants = (0.0, 0.7, 0.7, 2.0, 2.0)
    params = [
        SamplingParams(
            temperature=variants[number % VARIANTS], max_tokens=20, seed=plan.seed(number)
        )
        for number in numbers
    ]
    with LLM.from_loaded(loaded) as llm:
        answers = llm.chat([PROMPTS[number // VARIANTS] for number in numbers], params)
    ended = 0
    for index, (answer, param) in enumerate(zip(answers, params, strict=True)):
        tokens = data.tokens(index).tolist()
        assert tokens == [*answer.prompt_token_ids, *answer.token_ids]
        assert data.prompt_lengths[index] == len(answer.prompt_token_ids) <= 50
        assert data.temperatures[index] == np.float32(param.temperature)
        stops = answer.finish_reason == "stop"
        assert (tokens[-1] == EOS) == stops and EOS not in tokens[:-1]
        assert stops or len(answer.token_ids) == 20
        ended += stops
    assert 0 < ended < len(data), "some end, others are cut"
    assert len({bytes(data.tokens(index)) for index in range(len(data))}) > 4 * SHORT


def test_a_missing_shard_is_drawn_again(folder: Path, tmp_path: Path) -> None:
    before = contents(folder)
    names = {"manifest.json", *(f"shard-0000{index}.npz" for index in range(3))}
    assert before.keys() == names
    for name in names - {"shard-00001.npz"}:
        (tmp_path / name).write_bytes(before[name])
    with pytest.raises(ModelError, match=r"shard-00001\.npz is missing"):
        Dataset.open(tmp_path)
    done = generate(tiny_llama(), PROMPTS, tmp_path, DRAWN)
    assert (done.samples, done.shards_written, done.shards_found) == (10, 1, 2)
    assert contents(tmp_path) == before


def test_nothing_is_drawn_twice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(folder)
    monkeypatch.setattr(EngineCore, "__init__", None)  # no engine is needed
    done = generate(tiny_llama(), PROMPTS, folder, DRAWN)
    assert (done.samples, done.shards_written, done.shards_found) == (0, 0, 3)
    assert done.prompts_skipped == 1
    assert contents(folder) == before


def test_an_interrupted_run_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, steps = EngineCore.step, []

    def interrupted(core: EngineCore) -> list:
        steps.append(core)
        if len(list(tmp_path.glob("shard-*.npz"))) == 1:
            raise KeyboardInterrupt
        return step(core)

    with monkeypatch.context() as patch:
        patch.setattr(EngineCore, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(tiny_llama(), PROMPTS, tmp_path, DRAWN)
    done = generate(tiny_llama(), PROMPTS, tmp_path, DRAWN)
    assert (done.shards_written, done.shards_found) == (2, 1)
    assert contents(tmp_path) == contents(folder)


def test_the_engine_is_full_across_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, running = EngineCore.step, []

    def counted(core: EngineCore) -> list:
        deltas = step(core)
        running.append(len(core.scheduler.running))
        return deltas

    monkeypatch.setattr(EngineCore, "step", counted)
    options = dataclasses.replace(DRAWN, shard_size=2)
    generate(tiny_llama(), PROMPTS, tmp_path, options)
    first, last = running.index(4), len(running) - running[::-1].index(4)
    # Only where the end of a request is not read yet is its place empty.
    assert np.mean(running[first:last]) > 3.5
    assert last > 0.8 * len(running)


@pytest.mark.slow
def test_speculation_draws_the_same_text(tmp_path: Path) -> None:
    with_modules = tiny_model()
    without = load_tiny(PLAIN)
    same_name = dataclasses.replace(with_modules.config, model=without.config.model)
    for name, loaded in (
        ("with", dataclasses.replace(with_modules, config=same_name)),
        ("without", without),
    ):
        generate(loaded, PROMPTS, tmp_path / name, DRAWN)
    assert contents(tmp_path / "with") == contents(tmp_path / "without")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"temperatures": (0.0, 0.7)}, r"temperatures is \[0.0, 0.7, 2.0\] there"),
        ({"samples": 1}, "samples is 2 there and 1 here"),
        ({"max_tokens": 21}, "max_tokens is 20 there and 21 here"),
        ({"max_prompt_len": 51}, "max_prompt_len is 50 there and 51 here"),
        ({"shard_size": 11}, "shard_size is 10 there and 11 here"),
        ({"seed": 4}, "seed is 3 there and 4 here"),
    ],
)
def test_other_settings_are_refused(folder: Path, changes: dict[str, Any], said: str) -> None:
    before = contents(folder)
    with pytest.raises(ConfigError, match=f"holds data of other settings: {said}"):
        generate(tiny_llama(), PROMPTS, folder, dataclasses.replace(DRAWN, **changes))
    assert contents(folder) == before


def test_other_prompts_and_models_are_refused(folder: Path) -> None:
    loaded = tiny_llama()
    with pytest.raises(ConfigError, match=r"prompts is '[0-9a-f]{16}' there"):
        generate(loaded, PROMPTS[1:], folder, DRAWN)
    other = dataclasses.replace(loaded.config, model="other")
    with pytest.raises(ConfigError, match=r"model is '.*' there and 'other' here"):
        generate(dataclasses.replace(loaded, config=other), PROMPTS, folder, DRAWN)


def test_what_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    loaded = tiny_llama()
    long = dataclasses.replace(DRAWN, max_tokens=47)
    said = r"max_prompt_len \+ max_tokens must be <= max_model_len=96, got 50 \+ 47"
    with pytest.raises(ConfigError, match=said):
        generate(loaded, PROMPTS, tmp_path, long)
    with pytest.raises(ConfigError, match=r"max_prompt_len=50 leaves out all 1 prompt\(s\)"):
        generate(loaded, PROMPTS[SHORT:], tmp_path, DRAWN)
    with pytest.raises(ModelError, match="has no tokenizer"):
        generate(dataclasses.replace(loaded, tokenizer=None), PROMPTS, tmp_path, DRAWN)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"temperatures": ()}, "temperatures must hold at least one"),
        ({"temperatures": (0.7, 0.7)}, "temperatures must differ from each other"),
        ({"temperatures": (-1.0,)}, "temperature must be a number in"),
        ({"temperatures": [0.7]}, "temperatures must be"),
        ({"samples": 0}, "samples must be >= 1, got 0"),
        ({"max_tokens": 0}, "max_tokens must be >= 1, got 0"),
        ({"max_prompt_len": 0}, "max_prompt_len must be >= 1, got 0"),
        ({"shard_size": 0}, "shard_size must be >= 1, got 0"),
        ({"seed": -1}, r"seed must be in \[0, 2\*\*31\), got -1"),
    ],
)
def test_options_that_cannot_work(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        GenerateOptions(**changes)


# --- the command ---

ENGINE = ("--max-num-seqs=4", "--max-num-batched-tokens=16", "--row-multiple=16", "--page-size=4")
ENGINE = (*ENGINE, "--num-pages=128", "--max-model-len=96")
SAMPLING = ("--temperatures", "0", "2", "--samples=2", "--max-tokens=20", "--max-prompt-len=50")


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The arguments that draw from two files of prompts, but for the folder."""
    path = tmp_path_factory.mktemp("command")
    model = write_tiny_llama(path / "model", tokenizer=True, num_hidden_layers=1)
    rows = [json.dumps({"question": text}) for text in TEXTS[:2]]
    (path / "rows.jsonl").write_text("\n".join(rows))
    (path / "lines.txt").write_text("\n".join(TEXTS[2:]))
    files = [str(path / "rows.jsonl"), str(path / "lines.txt")]
    return ["generate", f"--model={model}", *ENGINE, *SAMPLING, "--prompts", *files]


def test_the_command(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = [*command, f"--out={tmp_path / 'out'}", "--shard-size=9", "--seed=3"]
    assert main(arguments) == 0
    data = Dataset.open(tmp_path / "out")
    assert len(data) == 5 * 3
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["settings"]["seed"] == 3 and manifest["token_dtype"] == "uint16"
    output = capsys.readouterr()
    assert output.out == ""
    assert "speculative tokens 0" in output.err
    assert "shard 1 of 2: 9 of 15 samples, " in output.err
    assert "shard 2 of 2: 15 of 15 samples, " in output.err and "tokens/s" in output.err
    tokens = int((data.lengths - data.prompt_lengths).sum())
    assert f"15 samples of {tokens} tokens in 2 shard(s), 0 shard(s) were there" in output.err
    assert "1 of 6 prompts had more than 50 tokens and were skipped" in output.err
    assert main(arguments) == 0
    assert "0 samples of 0 tokens in 0 shard(s), 2 shard(s) were there" in capsys.readouterr().err
    assert main([*arguments, "--samples=1"]) == 2
    said = "holds data of other settings: samples is 2 there and 1 here\n"
    error = capsys.readouterr().err.splitlines(keepends=True)[-1]
    assert error.startswith("error: ") and error.endswith(said)


def test_the_limit_is_of_every_file(command: list[str], tmp_path: Path) -> None:
    assert main([*command, f"--out={tmp_path}", "--limit=1"]) == 0
    assert len(Dataset.open(tmp_path)) == 2 * 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--prompts=absent.txt",), "cannot read the prompts of absent.txt"),
        (("--prompts=prompts.csv",), "a file of prompts must end in .jsonl"),
        (("--limit=0",), "the limit of prompts must be >= 1, got 0"),
        (("--temperatures", "1", "1"), "temperatures must differ from each other"),
        (("--max-tokens=0",), "max_tokens must be >= 1, got 0"),
        (("--max-num-seqs=0",), "max_num_seqs must be in [1, 1024], got 0"),
        (("--max-tokens=60",), "max_prompt_len + max_tokens must be <= max_model_len=96"),
        (("--model=nothing",), "unknown model 'nothing'"),
    ],
)
def test_what_a_user_can_correct(
    command: list[str],
    arguments: tuple[str, ...],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    assert main([*command, f"--out={tmp_path}", *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and said in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "COMMAND"),
        (("generate", "--out=out"), "--prompts"),
        (("generate", "--prompts=a.txt"), "--out"),
        (("generate", "--samples=x"), "--samples"),
    ],
)
def test_arguments_that_are_not_well_formed(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert said in capsys.readouterr().err
