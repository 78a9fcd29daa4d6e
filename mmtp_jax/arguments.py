"""Command-line options of the engine, shared by every command. Imports no jax."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, NoReturn

from mmtp_jax.config import (
    DTYPES,
    LARGE,
    SMALL,
    CacheConfig,
    ConfigError,
    EngineConfig,
    Limits,
    engine_config,
    require,
)

# Options that are fields of EngineConfig and CacheConfig under the same names.
_SAME = (
    "dtype",
    "seed",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "row_multiple",
    "load_format",
    "hf_overrides",
    "tensor_parallel_size",
    "enforce_eager",
    "page_size",
    "num_pages",
    "cache_bytes",
    "memory_fraction",
    "enable_prefix_caching",
)


class Parser(argparse.ArgumentParser):
    """Errors are one line and exit code 2, without the usage."""

    def __init__(self, prog: str, description: str, **settings: Any) -> None:
        super().__init__(
            prog=prog,
            usage="%(prog)s [options]",
            description=description,
            allow_abbrev=False,
            **settings,
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def option(group: Any, *flags: str, help: str, **settings: Any) -> None:
    """Add an option whose help shows its default."""
    if settings.get("default") is not None:
        help += " (default: %(default)s)"
    if settings.get("type") in (int, float):
        settings["metavar"] = "N" if settings["type"] is int else "X"
    group.add_argument(*flags, help=help, **settings)


def add_model_options(parser: argparse.ArgumentParser) -> Any:
    """What model to run; the group, for further options of it."""
    engine = EngineConfig
    group = parser.add_argument_group("model")
    option(
        group, "--model", default=engine.model, help="known name, directory, .gguf file or hub id"
    )
    help = "of parameters and cache; auto: bfloat16 on an accelerator, float32 on a CPU"
    option(group, "--dtype", choices=DTYPES, default=engine.dtype, help=help)
    help = "dummy makes random weights"
    choices = ("auto", "dummy")
    option(group, "--load-format", choices=choices, default=engine.load_format, help=help)
    option(group, "--seed", type=int, default=engine.seed, help="of sampling and random weights")
    help = 'replaces keys of the model\'s config.json, e.g. {"mtp_target_hidden": "post"}'
    option(group, "--hf-overrides", type=json_object, default={}, metavar="JSON", help=help)
    help = "devices that share every layer"
    default = engine.tensor_parallel_size
    option(group, "--tensor-parallel-size", type=int, default=default, help=help)
    return group


def add_modules_option(group: Any) -> None:
    """Which modules to run beside the target."""
    help = "folder of MTP modules trained for the model, instead of those that it ships"
    option(group, "--speculative-model", metavar="DIR", help=help)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """What model to run and how: groups model, engine, cache and speculation."""
    engine, cache = EngineConfig, CacheConfig
    group = add_model_options(parser)
    help = "a jinja file, or the template itself (default: the model's own)"
    option(group, "--chat-template", type=_file_or_text, metavar="TEMPLATE", help=help)

    group = parser.add_argument_group("engine")
    help = "context in tokens (default: what the model and the cache hold)"
    option(group, "--max-model-len", type=int, help=help)
    for name, help in zip(
        Limits._fields, ("requests that run at once", "rows of one step"), strict=True
    ):
        help += f" (default: {getattr(SMALL, name)} on a CPU, else {getattr(LARGE, name)})"
        option(group, f"--{name.replace('_', '-')}", type=int, help=help)
    help = "pad rows to a multiple; 64: float32 logits on a CPU do not depend on the batch"
    option(group, "--row-multiple", type=int, default=engine.row_multiple, help=help)
    help = "launch kernels one by one, not as a CUDA graph: slower, but traces name their part"
    switch: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    option(group, "--enforce-eager", **switch, default=engine.enforce_eager, help=help)

    group = parser.add_argument_group("cache")
    option(group, "--page-size", type=int, default=cache.page_size, help="positions of a page")
    option(group, "--num-pages", type=int, help="pages of the cache (default: by memory)")
    option(group, "--cache-bytes", type=int, help="size of the cache, instead of --num-pages")
    help = "share of the accelerator's memory to use"
    flags = ("--memory-fraction", "--gpu-memory-utilization")
    option(group, *flags, type=float, default=cache.memory_fraction, help=help)
    option(
        group,
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=cache.enable_prefix_caching,
        help="reuse what equal beginnings of prompts have cached",
    )

    group = parser.add_argument_group("speculation")
    help = 'e.g. {"method": "mtp", "num_speculative_tokens": 3, "load_format": "dummy"}'
    option(group, "--speculative-config", type=json_object, metavar="JSON", help=help)
    add_modules_option(group)
    help = (
        "drafts per step; 0 turns speculation off, auto lets every step choose up to the default"
        " (default: what the modules recommend, else one for each of the checkpoint's)"
    )
    option(group, "--num-speculative-tokens", type=_count, metavar="N|auto", help=help)


def engine_config_of(args: argparse.Namespace) -> EngineConfig:
    """The configuration that parsed options ask for; `ConfigError` if it cannot work."""
    speculative = _speculative(
        args.speculative_config, args.num_speculative_tokens, args.speculative_model
    )
    return engine_config(args.model, speculative, **{name: getattr(args, name) for name in _SAME})


def require_writable(file: Path | None) -> None:
    """`ConfigError` before anything is measured if --json is given and cannot be written."""
    if file is None:
        return
    try:
        file.open("a").close()
    except OSError as error:
        raise ConfigError(f"--json must name a file to write to: {error}") from None


def unicode_text(argument: str) -> str:
    """An argument as valid Unicode: bytes of another encoding become U+FFFD."""
    return os.fsencode(argument).decode(errors="replace")


def one_line(error: Exception) -> str:
    """What a user is told of an error; chat templates may raise several lines."""
    return f"error: {' '.join(str(error).split())}"


def _file_or_text(argument: str) -> str:
    if "{" in argument:
        return unicode_text(argument)
    try:
        with open(argument, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {argument}: {error}") from None


def _count(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number or auto, got {text!r}") from None


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return value


def _speculative(
    given: dict[str, Any] | None, count: int | str | None, model: str | None
) -> dict[str, Any] | None:
    """What --speculative-config, --num-speculative-tokens and --speculative-model say together.

    Raises `ConfigError` if they contradict each other.
    """
    if model is not None:
        given = given or {}
        require(
            given.get("model") in (None, model),
            f"--speculative-model {model} contradicts the {given.get('model')} of"
            " --speculative-config",
        )
        given = given | {"model": model}
    if count is None:
        return given
    given = given or {}
    other = 0 if given.get("method", "mtp") is None else given.get("num_speculative_tokens")
    require(
        other in (None, count),
        f"--num-speculative-tokens {count} contradicts the {other} of --speculative-config",
    )
    return given | {"num_speculative_tokens": count}
