"""Options become an `EngineConfig`; every one of its fields has an option, once."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mmtp_jax.arguments import Parser, add_engine_options, engine_config_of, one_line, unicode_text
from mmtp_jax.config import CacheConfig, ConfigError, EngineConfig, SpeculativeConfig


def parser() -> Parser:
    parser = Parser("prog", "what it does")
    add_engine_options(parser)
    return parser


def config_of(*arguments: str) -> EngineConfig:
    return engine_config_of(parser().parse_args(arguments))


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        parser().parse_args(arguments)
    assert end.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


def test_no_options_are_the_defaults() -> None:
    assert config_of() == EngineConfig()


# A value that is not the default, for every field.
ENGINE: dict[str, tuple[str, object]] = {
    "model": ("some/where", "some/where"),
    "dtype": ("bfloat16", "bfloat16"),
    "seed": ("3", 3),
    "max_model_len": ("77", 77),
    "max_num_seqs": ("5", 5),
    "max_num_batched_tokens": ("99", 99),
    "row_multiple": ("64", 64),
    "load_format": ("dummy", "dummy"),
    "hf_overrides": ('{"mtp_feed": "target"}', {"mtp_feed": "target"}),
    "tensor_parallel_size": ("2", 2),
}
CACHE: dict[str, tuple[str, object]] = {
    "page_size": ("4", 4),
    "num_pages": ("12", 12),
    "cache_bytes": ("1000", 1000),
    "memory_fraction": ("0.5", 0.5),
}


def test_every_field_has_an_option() -> None:
    engine = {field.name for field in dataclasses.fields(EngineConfig)} - {"cache", "speculative"}
    cache = {field.name for field in dataclasses.fields(CacheConfig)}
    assert engine == ENGINE.keys() | {"enforce_eager"}
    assert cache == CACHE.keys() | {"enable_prefix_caching"}


@pytest.mark.parametrize("name", ENGINE)
def test_options_of_the_engine(name: str) -> None:
    text, value = ENGINE[name]
    changed: dict[str, Any] = {name: value}
    assert config_of(f"--{name.replace('_', '-')}", text) == EngineConfig(**changed)


@pytest.mark.parametrize("name", CACHE)
def test_options_of_the_cache(name: str) -> None:
    text, value = CACHE[name]
    changed: dict[str, Any] = {name: value}
    expected = EngineConfig(cache=CacheConfig(**changed))
    assert config_of(f"--{name.replace('_', '-')}={text}") == expected


def test_switches_and_the_other_name_of_the_memory_fraction() -> None:
    assert config_of("--enforce-eager").enforce_eager
    assert not config_of("--no-enable-prefix-caching").cache.enable_prefix_caching
    assert config_of("--gpu-memory-utilization=0.3").cache.memory_fraction == 0.3


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--num-speculative-tokens=0",), SpeculativeConfig(num_speculative_tokens=0)),
        (("--num-speculative-tokens=auto",), SpeculativeConfig(num_speculative_tokens="auto")),
        (
            ('--speculative-config={"num_speculative_tokens": 3, "load_format": "dummy"}',),
            SpeculativeConfig(num_speculative_tokens=3, load_format="dummy"),
        ),
        (
            ('--speculative-config={"load_format": "dummy"}', "--num-speculative-tokens=2"),
            SpeculativeConfig(num_speculative_tokens=2, load_format="dummy"),
        ),
        (
            ('--speculative-config={"num_speculative_tokens": 2}', "--num-speculative-tokens=2"),
            SpeculativeConfig(num_speculative_tokens=2),
        ),
        (
            ('--speculative-config={"method": null}', "--num-speculative-tokens=0"),
            SpeculativeConfig(method=None, num_speculative_tokens=0),
        ),
        (("--speculative-model=a/b",), SpeculativeConfig(model="a/b")),
        (
            ("--speculative-model=a/b", "--num-speculative-tokens=2"),
            SpeculativeConfig(model="a/b", num_speculative_tokens=2),
        ),
        (
            ('--speculative-config={"model": "a/b"}', "--speculative-model=a/b"),
            SpeculativeConfig(model="a/b"),
        ),
    ],
)
def test_speculation(arguments: tuple[str, ...], expected: SpeculativeConfig) -> None:
    assert config_of(*arguments).speculative == expected


@pytest.mark.parametrize("given", ['{"num_speculative_tokens": 3}', '{"method": null}'])
def test_contradictory_speculation(given: str) -> None:
    with pytest.raises(ConfigError, match=r"--num-speculative-tokens 2 contradicts the [30] of"):
        config_of("--speculative-config", given, "--num-speculative-tokens=2")
    with pytest.raises(ConfigError, match=r"--speculative-model a contradicts the b of"):
        config_of('--speculative-config={"model": "b"}', "--speculative-model=a")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--nope",), "unrecognized arguments: --nope"),
        (("--max-num", "3"), "unrecognized arguments: --max-num 3"),
        (("--seed", "x"), "argument --seed: invalid int value: 'x'"),
        (("--speculative-config", "[" * 100_000), "argument --speculative-config: not valid JSON"),
        (("--speculative-config", "3"), "argument --speculative-config: must be a JSON object"),
        (("--chat-template", "no such file"), "argument --chat-template: cannot read no such file"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert error_of(capsys, *arguments).startswith(f"error: {message}")


def test_a_chat_template_is_a_file_or_itself(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def template(argument: str) -> object:
        return parser().parse_args(["--chat-template", argument]).chat_template

    text = "{{ messages[0]['content'] }}é\n"
    file = tmp_path / "template.jinja"
    file.write_text(text, encoding="utf-8")
    assert template(str(file)) == template(text) == text
    assert parser().parse_args([]).chat_template is None
    file.write_bytes(b"\xff")
    assert "cannot read" in error_of(capsys, "--chat-template", str(file))
    assert "cannot read" in error_of(capsys, "--chat-template", str(tmp_path))


def test_help_shows_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parser().parse_args(["--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("usage: prog [options] what it does")
    assert "None" not in text
    assert "--max-num-seqs N requests that run at once (default: 8 on a CPU, else 256)" in text
    for action in parser()._actions:
        assert action.help, action.option_strings
        if isinstance(action.default, int | float) and action.default is not argparse.SUPPRESS:
            assert f"(default: {action.default})" in text


def test_texts() -> None:
    assert unicode_text("é") == "é"
    assert unicode_text(b"a\xff".decode(errors="surrogateescape")) == "a\N{REPLACEMENT CHARACTER}"
    assert one_line(ValueError("one\n  two")) == "error: one two"
