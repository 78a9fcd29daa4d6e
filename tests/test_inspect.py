"""What the inspect command prints of the checkpoints in tests/parity."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmtp_jax.inspect import main

GOLDENS = Path(__file__).parent / "parity" / "goldens"


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, list[str]]:
    """The printed lines by their label."""
    assert main(arguments) == 0
    lines: dict[str, list[str]] = {}
    label = ""
    for line in capsys.readouterr().out.splitlines():
        label = line[:13].strip() or label
        lines.setdefault(label, []).append(line[13:].strip())
    return lines


def test_inkling(capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(capsys, str(GOLDENS / "inkling"), "--max-model-len", "64", "--page-size", "4")
    assert lines["family"] == ["inkling"]
    assert len(lines["layers"]) == 3 and lines["layers"][0].startswith("0-1: sliding 6")
    assert lines["modules"][0].startswith("0,2-3: sliding 6")
    assert lines["MTP"][0].startswith("4 module(s), hidden_first")
    # k and v of the global layer: 2 heads of 8 entries, float32.
    assert any(
        "target, 1 layer(s), k v, all positions: 128 bytes" in line for line in lines["cache"]
    )
    assert "64 tokens" in lines["memory"][0]


def test_every_golden_can_be_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    for directory in sorted(GOLDENS.iterdir()):
        assert "parameters" in lines_of(capsys, str(directory))


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    directory = str(GOLDENS / "step3p5")
    lines = lines_of(capsys, "--model", directory, "--dtype", "bfloat16")
    assert lines["weights"][0].endswith("bfloat16")
    overrides = json.dumps({"mtp_target_hidden": "post"})
    changed = lines_of(capsys, directory, "--hf-overrides", overrides)
    assert "post-norm" in changed["MTP"][0] and "pre-norm" in lines["MTP"][0]


def test_dummy_weights_need_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = (GOLDENS / "inkling" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    with_files = lines_of(capsys, str(GOLDENS / "inkling"))
    assert lines_of(capsys, str(tmp_path), "--load-format", "dummy") == with_files
    assert main([str(tmp_path)]) == 1
    assert "safetensors" in capsys.readouterr().err


def test_what_would_be_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = GOLDENS / "llama"
    config = json.loads((source / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    assert main([str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert "refused       the checkpoint lacks the tensors model.layers." in output
    (tmp_path / "config.json").write_text(json.dumps(config | {"frobnicate": 3}))
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: config.json sets frobnicate=3")
