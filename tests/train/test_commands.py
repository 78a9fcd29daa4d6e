"""From prompts to packed modules by the commands, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from models_for_tests import write_tiny_llama

from mmtp_jax.modules.checkpoint import open_modules
from mmtp_jax.train.__main__ import main

ENGINE = "--max-num-seqs=4 --max-num-batched-tokens=16 --row-multiple=16 --num-pages=65".split()
FIT = "--batch-tokens=256 --num-modules=2 --steps=4 --warmup=1 --log-every=2 --held-out=2".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, prompts, and data of the model."""
    path = tmp_path_factory.mktemp("commands")
    write_tiny_llama(path / "model", tokenizer=True)
    words = ["hello there", "what is 1 + 1?", "abc", "zz top", "a long road", "no"]
    (path / "prompts.txt").write_text("\n".join(words))
    command = ["generate", f"--model={path / 'model'}", f"--prompts={path / 'prompts.txt'}"]
    assert (
        main(
            [*command, f"--out={path / 'data'}", "--max-tokens=20", "--max-prompt-len=60", *ENGINE]
        )
        == 0
    )
    return path


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    command = ["fit", f"--model={folder / 'model'}", f"--data={folder / 'data'}"]
    assert main([*command, f"--out={folder / 'run'}", *FIT]) == 0
    return folder / "run" / "modules"


def test_trained_modules_are_packed_and_evaluated(
    folder: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, packed = f"--model={folder / 'model'}", folder / "packed"
    options = ["--storage=int8", "--num-speculative-tokens=1"]
    assert main(["pack", model, f"--modules={trained}", f"--out={packed}", *options]) == 0
    modules = open_modules(packed)
    assert (modules.storage, modules.num_speculative_tokens) == ("int8", 1)
    assert modules.facts == open_modules(trained).facts
    assert modules.facts["initial"] == "fitted"
    command = ["eval", model, f"--speculative-model={trained}", "--temperatures", "0", "1"]
    file = folder / "eval.json"
    command += [f"--prompts={folder / 'prompts.txt'}", f"--json={file}", "--max-tokens=16"]
    capsys.readouterr()
    assert main([*command, "--limit=3", *ENGINE]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == json.loads(file.read_text())
    assert [one["temperature"] for one in said["results"]] == [0.0, 1.0]
    for one in said["results"]:
        assert (one["prompts"], one["num_prompts"], len(one["reached"])) == ("prompts", 3, 2)
        assert one["expected_tokens_per_step"][-1] == pytest.approx(one["tokens_per_step"])


def test_training_goes_on_from_modules(folder: Path, trained: Path) -> None:
    command = ["fit", f"--model={folder / 'model'}", f"--data={folder / 'data'}"]
    command += [f"--from={trained}", f"--out={folder / 'more'}"]
    assert main([*command, *FIT, "--learning-rate=1e-5"]) == 0
    first, *_, last = (
        json.loads((folder / run / "log.jsonl").read_text().splitlines()[place])["loss"]
        for run, place in (("more", 0), ("run", -1))
    )
    assert first[0] < 1.1 * last[0]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["fit", "--data=missing"], "missing holds no training data"),
        (["fit", "--decay=0"], r"decay must be in (0, 1]"),
        (["fit", "--batch-tokens=1"], "batch_tokens must be in [64, "),
        (["fit", "--num-modules=0"], "num_modules must be in [1, 32]"),
        (["fit", "--from=missing"], "there is no folder of MTP modules at missing"),
        (["fit", "--tensor-parallel-size=2"], "tensor_parallel_size must be 1"),
        (["eval", "--temperatures=-1"], "temperatures must be in [0, 2]"),
        (["eval", "--num-speculative-tokens=0"], "no module for every draft"),
        (["eval", "--json=/no/such/file"], "--json must name a file to write to"),
        (["pack", "--modules=missing"], "there is no folder of MTP modules at missing"),
    ],
)
def test_refused(
    command: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {flag.split("=")[0] for flag in command}
    wanted = {
        "fit": {"--data": folder / "data", "--out": folder / "refused"},
        "eval": {"--prompts": folder / "prompts.txt"},
        "pack": {"--out": folder / "refused"},
    }[command[0]]
    flags = [f"{flag}={value}" for flag, value in wanted.items() if flag not in given]
    assert main([*command, f"--model={folder / 'model'}", *flags]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not (folder / "refused").exists()
