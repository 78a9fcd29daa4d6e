"""Every command end to end over a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest
from models_for_tests import write_tiny_llama

from mmtp_jax.bench.__main__ import main

FACTS = {"command", "commit", "device", "num_devices", "platform", "jax"}
LAYER = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32 + (32 + 2 * 16)
MODULE = LAYER + 2 * 32 * 32 + 3 * 32
PARAMETERS = LAYER + 2 * 64 * 32 + 32
LATENCY = ("latency", "--batch=2", "--prompt-len=7", "--steps=3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer and two modules: programs that compile quickly."""
    folder = tmp_path_factory.mktemp("mimo")
    return write_tiny_llama(folder, modules=2, family="mimo", num_hidden_layers=1)


@pytest.fixture(scope="module")
def latency(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One report: without drafts, with those of two modules, with none and all of them accepted."""
    folder = tmp_path_factory.mktemp("latency")
    arguments = ["--num-speculative-tokens", "0", "2", "--acceptance", "0", "1"]
    arguments += [f"--model={model}", f"--json={folder / 'out.json'}"]
    assert main([*LATENCY, *arguments, f"--profile={folder / 'traces'}"]) == 0
    traces = folder / "traces"
    for name in ("off-k0-b2", "off-k0-b2-named", "on-k2-b2", "on-k2-b2-named", "synthetic-k2-b2"):
        assert list((traces / name).rglob("*.xplane.pb"))
    report: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return report


def test_latency_says_what_was_run_and_where(latency: dict[str, Any]) -> None:
    assert set(latency) == FACTS | {"rates", "startup", "results"}
    assert latency["command"].startswith("python -m mmtp_jax.bench latency --batch=2")
    assert latency["jax"] == jax.__version__
    assert latency["startup"]["k=0"]["target_parameters"] == PARAMETERS
    assert latency["startup"]["k=2"]["module_parameters"] == 2 * MODULE


def test_latency_measures_every_mode(latency: dict[str, Any]) -> None:
    modes = [(one["mode"], one["num_speculative_tokens"]) for one in latency["results"]]
    assert modes == [("off", 0), ("on", 2), ("synthetic", 2), ("synthetic", 2)]
    assert [one["acceptance"] for one in latency["results"]] == [None, None, 0, 1]
    for one in latency["results"]:
        assert one["batch"] == 2 and one["rows"] == 2 * (one["num_speculative_tokens"] + 1)
        assert one["programs"] == 1 + 4  # one step; admission and the like
        assert one["mixed"] is None
        assert one["context"] > 7 + 8 + 3
        for name in ("engine_ms_per_step", "bare_ms_per_step", "tokens_per_second", "floor_ms"):
            assert one[name] > 0
        assert one["device_busy"] == one["bare_ms_per_step"] / one["engine_ms_per_step"]
        assert one["roofline"] == one["floor_ms"] / one["bare_ms_per_step"]
        floor = one["floor_bytes"] / latency["rates"]["bytes_per_second"]
        floor = max(floor, one["floor_flops"] / latency["rates"]["flops_per_second"])
        assert one["floor_ms"] == pytest.approx(1e3 * floor)


def test_drafts_are_accepted_as_often_as_they_should_be(latency: dict[str, Any]) -> None:
    off, on, none, every = latency["results"]
    assert off["tokens_per_step"] == 1 and 1 <= on["tokens_per_step"] < 3
    assert none["tokens_per_step"] == none["expected_tokens_per_step"] == 1
    assert every["tokens_per_step"] == every["expected_tokens_per_step"] == 3
    assert none["equal_texts"] == every["equal_texts"] == 2


@pytest.mark.slow
def test_steps_with_chunks(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--num-speculative-tokens=2", "--prefill-chunk=5", "--max-model-len=112"]
    assert main([*LATENCY, *options, f"--model={model}"]) == 0
    output = capsys.readouterr()
    assert "roofline" in output.err and "with chunk" in output.err
    (one,) = json.loads(output.out)["results"]
    mixed = one["mixed"]
    assert one["rows"] == 6 and mixed["prefill_chunk"] == 5 and mixed["rows"] == 11
    assert mixed["bare_ratio"] == mixed["bare_ms_per_step"] / one["bare_ms_per_step"]
    assert mixed["engine_ratio"] == mixed["engine_ms_per_step"] / one["engine_ms_per_step"]
    assert mixed["floor_ms"] > 0


def test_throughput(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    arguments = ["--num-prompts=5", "--prompt-len=6", "--output-len=7", "--max-num-seqs=2"]
    arguments += ["--max-num-batched-tokens=12", "--row-counts", "12"]
    arguments += ["--num-speculative-tokens=2", f"--model={model}", f"--json={file}"]
    assert main(["throughput", *arguments]) == 0
    report = json.loads(file.read_text())
    assert set(report) == FACTS | {"result"}
    result = report["result"]
    assert result["row_counts"] == [12] and result["programs"] == 5
    assert result["output_tokens_per_second"] == pytest.approx(5 * 7 / result["seconds"])
    assert result["total_tokens_per_second"] == pytest.approx(5 * 13 / result["seconds"])
    assert result["requests_per_second"] == pytest.approx(5 / result["seconds"])
    assert 5 * 7 / 2 / 3 <= result["steps"] <= 5 * 7
    assert 1 <= result["tokens_per_step"] <= 3 and 0 < result["in_steps"] <= 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("latency", "--batch", "0"), "--batch must be >= 1, got 0"),
        (("latency", "--batch", "2000"), "--batch must be <= 1024"),
        (("latency", "--steps", "0"), "--steps must be >= 1, got 0"),
        (("latency", "--prompt-len", "0"), "--prompt-len must be >= 1"),
        (("latency", "--num-speculative-tokens", "-1"), "--num-speculative-tokens must be >= 0"),
        (("latency", "--prefill-chunk", "-1"), "--prefill-chunk must be >= 0"),
        (("latency", "--acceptance", "1.5"), "--acceptance must be in [0, 1], got 1.5"),
        (("latency", "--max-model-len", "8"), "--max-model-len must be >= "),
        (("latency", "--model", "nothing"), "unknown model 'nothing'"),
        (("throughput", "--output-len", "0"), "--output-len must be >= 1, got 0"),
        (("throughput", "--row-counts", "8", "4"), "--row-counts must ascend from at least 1"),
        (("throughput", "--model", "nothing"), "unknown model 'nothing'"),
        (("startup", "--model", "nothing"), "unknown model 'nothing'"),
    ],
)
def test_wrong_values_are_one_line_and_exit_code_2(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith(f"error: {said}")
    assert output.err.count("\n") == 1


def test_wrong_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["latency", "--batch", "many"])
    assert end.value.code == 2
    assert "argument --batch: invalid int value: 'many'" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_said_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*LATENCY, "--model=nothing", f"--json={tmp_path}"]) == 2
    assert "--json must name a file to write to" in capsys.readouterr().err


@pytest.mark.parametrize("keep", [True, False])
def test_compiled_programs_are_kept_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    updates: list[tuple[str, object]] = []
    monkeypatch.setattr(jax.config, "update", lambda *update: updates.append(update))
    flag = "--compilation-cache" if keep else "--no-compilation-cache"
    assert main(["throughput", "--model=nothing", flag]) == 2
    assert (("jax_enable_compilation_cache", False) in updates) is not keep
