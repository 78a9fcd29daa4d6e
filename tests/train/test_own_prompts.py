"""Prompts that the target writes: where they begin and end, and which are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from llm_for_tests import OPTIONS, PLAIN
from models_for_tests import write_tiny_llama

from mmtp_jax.config import ConfigError, engine_config
from mmtp_jax.llm import LLM
from mmtp_jax.loader import LoadedModel, load_model
from mmtp_jax.prompt_files import read_prompts
from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.tokenizer import ChatTemplateError
from mmtp_jax.train.__main__ import main
from mmtp_jax.train.own_prompts import _keep, _turn, write_own_prompts
from mmtp_jax.train.samples import GenerateOptions, SamplePlan
from mmtp_jax.train.shards import Dataset

OPENING = "<|im_start|>user\n"
ENDS = {2, 4}
"""`</s>`, and `<|im_end|>`, which ends a message without ending a text."""
OTHER_SPECIAL = {0, 1, 3}
DRAWN = GenerateOptions(
    temperatures=(0.9, 2.0), samples=10, max_tokens=40, max_prompt_len=20, shard_size=5, seed=3
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(
        tmp_path_factory.mktemp("own") / "model", tokenizer=True, num_hidden_layers=1
    )


@pytest.fixture(scope="module")
def loaded(model: Path) -> LoadedModel:
    return load_model(engine_config(str(model), PLAIN, **OPTIONS))


def texts_of(path: Path) -> list[str]:
    return [conversation[0]["content"] for conversation in read_prompts(path)]


@pytest.mark.parametrize("name", ["own.jsonl", "own.jsonl.gz"])
def test_prompts_are_what_the_model_writes_as_a_user(
    loaded: LoadedModel, tmp_path: Path, name: str
) -> None:
    kept = write_own_prompts(loaded, tmp_path / name, DRAWN)
    assert [path.name for path in tmp_path.iterdir()] == [name], "nothing else is left"
    assert texts_of(tmp_path / name) == kept.texts
    plan = SamplePlan(1, DRAWN)
    numbers = [number for index in range(plan.num_shards) for number in plan.shard(index).tolist()]
    params = [
        SamplingParams(temperature=plan.temperature(number), max_tokens=40, seed=plan.seed(number))
        for number in numbers
    ]
    assert loaded.tokenizer is not None
    opening = loaded.tokenizer.encode(OPENING, add_special_tokens=False)
    with LLM.from_loaded(loaded) as llm:
        written = llm.generate([opening] * len(params), params)
    messages, unusable = [], 0
    for ids in (list(one.token_ids) for one in written):
        end = next((place for place, token in enumerate(ids) if token in ENDS), None)
        if end is not None:
            text = loaded.tokenizer.decode(ids[:end]).strip()
            usable = text and not OTHER_SPECIAL & set(ids[:end])
            messages += [text] if usable else []
            unusable += not usable
    assert kept.texts == list(dict.fromkeys(messages))
    assert kept.unusable == unusable and kept.repeated == len(messages) - len(kept.texts)
    assert kept.unfinished == len(written) - len(messages) - unusable
    assert 0 < kept.unfinished < len(written), "some end, others are cut"


def test_an_interrupted_run_goes_on(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write_own_prompts(loaded, tmp_path / "whole.jsonl", DRAWN)
    path = tmp_path / "own.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr("mmtp_jax.train.own_prompts.Dataset.open", lambda folder: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_own_prompts(loaded, path, DRAWN)
    assert not path.exists()
    monkeypatch.setattr("mmtp_jax.train.generate.EngineCore", None)  # nothing is drawn again
    assert write_own_prompts(loaded, path, DRAWN) == whole
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}<|User|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "opening", "ending"),
    [
        (None, OPENING, "<|im_end|>"),
        (
            LLAMA_3,
            "<s><|start_header_id|>user<|end_header_id|>\n\n",
            "<|eot_id|><|start_header_id|>assistant<|end_header_id|>",
        ),
        (MISTRAL, "<s>[inst]", "[/INST]"),
        (DEEPSEEK, "<s><|user|>", "<|Assistant|>"),
    ],
    ids=["chatml", "llama3", "mistral", "deepseek"],
)
def test_where_a_message_begins_and_ends(
    loaded: LoadedModel, template: str | None, opening: str, ending: str
) -> None:
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    if template is not None:
        tokenizer = tokenizer.with_chat_template(template)
    ids, after = _turn(tokenizer)
    assert ids == tokenizer.encode(opening, add_special_tokens=False)
    assert after == ending


@pytest.mark.parametrize("template", ["hello", "{{ messages[0].content }}!"])
def test_a_template_that_does_not_show_where_is_refused(loaded: LoadedModel, template: str) -> None:
    assert loaded.tokenizer is not None
    with pytest.raises(ChatTemplateError, match="must show the message of a user, and something"):
        _turn(loaded.tokenizer.with_chat_template(template))


def test_what_is_kept(loaded: LoadedModel) -> None:
    words = [f"word{number}" for number in range(20)]
    excluded = [[{"role": "user", "content": "Well: " + " ".join(words).upper()}]]
    messages = [
        "what is it?",
        None,
        "",
        "what is \N{REPLACEMENT CHARACTER}?",
        "go on <|im_end|> and on",
        "what is it?",
        "say " + " ".join(words[3:16]),
        "say " + " ".join(words[3:15]),
        " ".join(words[:12]) + " and " + " ".join(words[12:]),
    ]
    assert loaded.tokenizer is not None
    kept = _keep(messages, loaded.tokenizer, excluded)
    assert kept.texts == [messages[0], messages[7], messages[8]]
    assert (kept.unfinished, kept.unusable, kept.repeated, kept.excluded) == (1, 3, 1, 1)


# --- the command ---

ENGINE = ("--max-num-seqs=4", "--max-num-batched-tokens=16", "--row-multiple=16", "--page-size=4")
ENGINE = (*ENGINE, "--num-pages=128", "--max-model-len=96")


def test_the_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "sets.txt").write_text("some prompt of an evaluation set")
    command = ["prompts", f"--model={model}", *ENGINE, "--temperatures", "0.9", "2"]
    command += ["--samples=6", "--max-tokens=40", f"--exclude={tmp_path / 'sets.txt'}"]
    file = tmp_path / "own.jsonl"
    assert main([*command, f"--out={file}"]) == 0
    kept = texts_of(file)
    said = capsys.readouterr()
    assert said.out == "" and "speculative tokens 0" in said.err
    assert f"own.jsonl: {len(kept)} prompts; dropped" in said.err
    data = tmp_path / "data"
    command = ["generate", f"--model={model}", *ENGINE, f"--prompts={file}", f"--out={data}"]
    assert main([*command, "--max-tokens=8", "--max-prompt-len=80", "--temperatures", "0"]) == 0
    assert len(Dataset.open(data)) == len(kept)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--out=own.txt",), "the file of prompts must end in .jsonl or .jsonl.gz, got own.txt"),
        (("--exclude=absent.txt",), "cannot read the prompts of absent.txt"),
        (("--temperatures", "0"), "temperatures must be above 0 to write prompts, got 0.0"),
        (("--samples=0",), "samples must be >= 1, got 0"),
        (("--max-tokens=95",), "max_prompt_len + max_tokens must be <= max_model_len=96"),
    ],
)
def test_what_a_user_can_correct(
    model: Path,
    arguments: tuple[str, ...],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    out = f"--out={tmp_path / 'own.jsonl'}"
    assert main(["prompts", f"--model={model}", *ENGINE, out, *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and said in error
    assert list(tmp_path.iterdir()) == []


def test_files_that_cannot_be_written(loaded: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write training data to .*own\.jsonl\.drawn"):
        write_own_prompts(loaded, tmp_path / "file" / "own.jsonl", DRAWN)
    folder = tmp_path / "own.jsonl"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"cannot write prompts to .*own\.jsonl: "):
        write_own_prompts(loaded, folder, DRAWN)
