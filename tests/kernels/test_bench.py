"""The command that measures kernels, over tiny cases with interpreted kernels."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bench import __main__ as command
from pallas_kernels.bench import attention, choose_token, grouped_matmul, kv_write, measure, report
from pallas_kernels.bench.attention import AttentionCase, alternatives
from pallas_kernels.bench.choose_token import ChoiceCase
from pallas_kernels.bench.grouped_matmul import GroupedCase
from pallas_kernels.bench.kv_write import WriteCase
from pallas_kernels.bench.measure import Failure, Result, Variant, calls_for
from pallas_kernels.bench.output import show
from pallas_kernels.bench.timing import Rates
from pallas_kernels.ragged_paged_attention.config import Config, Key

RATES = Rates(1e9, 1e11)
TINY: dict[Any, list[Any]] = {
    attention: [
        AttentionCase("plain", ((2, 40), (1, 9)), 4, 2, 16),
        AttentionCase("windowed", ((3, 60),), 3, 1, 16, window=20),
    ],
    kv_write: [
        WriteCase("tiny", "rotate_and_write", 5, 4, 2, 16),
        WriteCase("tiny", "kv_write", 5, 4, 2, 16),
    ],
    choose_token: [
        ChoiceCase("greedy", 3, 300),
        ChoiceCase("temperature", 3, 300, 0.7),
        ChoiceCase("top-p", 3, 300, 0.9, 0.8),
    ],
    grouped_matmul: [GroupedCase(4, 32, 16, 3)],
}
IMPLEMENTATIONS = {
    "attention": {"triton"},
    "kv_write": {"triton", "xla"},
    "choose_token": {"triton", "argmax"},
    "grouped_matmul": {"triton", "xla", "ragged_dot"},
}


_compile = measure._compiled
_lock = threading.Lock()
_choices: dict[str, Any] = {}


def compiled(variant: Variant, shapes: tuple[Any, ...]) -> Any:
    """As by the command, but the kernel that chooses tokens, which takes long, only once: what the
    rows want is data."""
    if variant.call.__name__ != "by_kernel":
        return _compile(variant, shapes)
    key = str(shapes)
    with _lock:
        if key not in _choices:
            _choices[key] = _compile(variant, shapes)
    return _choices[key]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny cases, two calls each, and no large copies and products."""
    for module, cases in TINY.items():
        monkeypatch.setattr(module, "CASES", cases)
        monkeypatch.setattr(module, "calls_for", lambda _: 2)
    monkeypatch.setattr(measure, "_compiled", compiled)
    monkeypatch.setattr(kv_write, "PAGES", 8)
    monkeypatch.setattr(command, "_has_gpu", lambda: True)
    monkeypatch.setattr(command, "measure_rates", lambda: RATES)


@pytest.mark.slow
def test_all_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    assert command.main([f"--json={file}"]) == 0
    output = capsys.readouterr()
    facts = json.loads(output.out)
    assert facts == json.loads(file.read_text())
    assert facts["command"] == f"python -m pallas_kernels.bench --json={file}"
    assert facts["device"] == jax.devices()[0].device_kind
    assert facts["jax"] == jax.__version__
    assert facts["rates"] == dataclasses.asdict(RATES) and facts["failures"] == []
    results = [Result(**one) for one in facts["results"]]
    found: dict[str, set[str]] = {}
    for one in results:
        found.setdefault(one.kernel, set()).add(one.implementation)
        assert one.us > 0 and one.error < 5e-3, one
        assert one.percent_of_copy == pytest.approx(100 * one.gb_per_s, abs=6)
        assert one.case in output.err
    assert found == IMPLEMENTATIONS
    assert len(results) == 2 + 2 * 2 + 3 + 1 + 3


def test_one_kernel_and_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["attention", "--cases", "window"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["results"]
    assert (one["kernel"], one["case"], one["calls"]) == ("attention", "windowed", 2)


def test_tuning_prints_entries_of_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [Config(16, 32, 2, 4, 2, 16), Config(32, 16, 1, 4, 2)]
    monkeypatch.setattr(attention, "alternatives", lambda _: others)
    assert command.main(["attention", "--tune", "--cases=plain"]) == 0
    output = capsys.readouterr()
    results = json.loads(output.out)["results"]
    assert [one["implementation"] for one in results] == ["triton", *map(repr, others)]
    entry = output.err.strip().splitlines()[-1].partition("  #")[0]
    ((key, config),) = eval(f"{{{entry}}}", {"Key": Key, "Config": Config}).items()
    assert key == Key(jax.devices()[0].device_kind, 2, 16, 2, 2, 2, 2)
    assert config in (*others, TINY[attention][0].config)


def test_alternatives_differ_in_one_or_two_things() -> None:
    used = Config(32, 64, 2, 4, 5)
    found = alternatives(used)
    assert used not in found and len(set(found)) == len(found)
    launch = {"num_warps", "num_stages"}
    parts = {"splits", "combines_apart"}
    for config in found:
        changed = {
            name
            for name, value in dataclasses.asdict(config).items()
            if value != getattr(used, name)
        }
        things = len(changed - launch - parts) + bool(changed & launch) + bool(changed & parts)
        assert 1 <= things <= 2
        assert 16 <= config.block_m <= 128 and config.splits >= 1


def test_wrong_results_and_failures_are_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention.AttentionCase, "error", lambda *_: 0.5)
    assert command.main(["attention", "--cases=plain"]) == 1
    monkeypatch.setattr(attention.AttentionCase, "error", lambda *_: float("nan"))
    assert command.main(["attention", "--cases=plain"]) == 1
    capsys.readouterr()

    def refuse(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("too much shared memory\nand more")

    monkeypatch.setattr(measure, "_compiled", refuse)
    assert command.main(["attention", "--cases=plain"]) == 1
    output = capsys.readouterr()
    (failure,) = json.loads(output.out)["failures"]
    assert failure == dataclasses.asdict(
        Failure("attention", "plain", "triton", "too much shared memory")
    )
    assert "failed, too much shared memory" in output.err


def test_errors_are_found() -> None:
    """Right results have a small error, others a large one."""
    quick = {attention: "triton", kv_write: "xla", choose_token: "triton", grouped_matmul: "xla"}
    for module, name in quick.items():
        for case in TINY[module]:
            arguments = case.arguments()
            program = compiled(case.variants()[name], jax.eval_shape(case.arguments))
            passed, result = program(jax.tree.map(jnp.copy, arguments[0]), *arguments[1:])
            assert case.error(name, arguments, result, passed) < 5e-3
            passed = jax.tree.map(lambda x: x + 1, passed)
            error = case.error(name, arguments, result + 1, passed)
            assert error > 0.05, (module.__name__, name)


def test_calls() -> None:
    assert calls_for(2e7) == 16  # moves enough
    assert calls_for(1.9e7) == 64  # dispatching the program would count
    assert calls_for(1e6) == 100  # together twice an L2 cache
    assert calls_for(10) == 256
    assert calls_for(9.9e5) == 100  # even: products go up and down in turns


def test_calls_wait_for_each_other() -> None:
    """The last result depends on the first argument through every call."""
    variant = Variant(lambda number, x, y: (x * 2 + number, y), 5)
    program = compiled(variant, jax.eval_shape(lambda: (jnp.int32(0), jnp.int32(0))))
    passed, first = program(jnp.int32(1), jnp.int32(3))
    x = 1
    for number in range(5):
        x = x * 2 + number
    assert (int(passed), int(first)) == (x, 3)


def test_bytes_and_operations() -> None:
    plain, windowed = TINY[attention]
    assert plain.bytes_moved == 4 * 16 * (49 * 2 + 3 * 4)
    assert plain.flops == 4 * 16 * 4 * (39 + 40 + 9)
    assert windowed.bytes_moved == 4 * 16 * (22 + 3 * 3)  # 3 windows of 20 span 22 keys
    assert windowed.flops == 4 * 16 * 3 * 60
    rotated, written = TINY[kv_write]
    assert rotated.bytes_moved == 5 * (2 * (4 + 2 + 2) * 16 * 2 + 2 * 8 * 4)
    assert written.bytes_moved == 5 * 2 * (2 + 2) * 16 * 2
    assert GroupedCase(1, 8, 4, 1).bytes_moved == 2 * (8 * 4 + 6 * (8 + 4))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["attention", "matmul"], "kernels must be among attention, kv_write, "),
        (["--cases=nothing"], "--cases must be part of the name of a case, got 'nothing'"),
        (["kv_write", "--tune"], "--tune needs the kernel attention"),
        (["--tune", "--cases=greedy"], "--cases must be part of the name of a case"),
    ],
)
def test_wrong_values_are_one_line_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith(f"error: {said}")
    assert output.err.count("\n") == 1


def test_no_gpu_and_no_place_for_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command.main([f"--json={tmp_path}"]) == 2
    assert "--json must name a file to write to" in capsys.readouterr().err
    monkeypatch.setattr(command, "_has_gpu", lambda: False)
    assert command.main([]) == 2
    assert "a GPU is needed" in capsys.readouterr().err


def test_a_wide_table(capsys: pytest.CaptureFixture[str]) -> None:
    one = Result("attention", "plain", "triton", 4, 12.5, 100.0, 1.0, 50.0, 5.0, 1e-3)
    show(report.table([one, Failure("attention", "x", "y", "z")], RATES))
    text = capsys.readouterr().err
    assert "12.50" in text and "50 %" in text and "failed" in text
    assert np.max([len(line.rstrip()) for line in text.splitlines()]) <= 200
