"""The command `python -m mmtp_jax.serve`: load a model and answer on the terminal.

Answers go to stdout, everything else to stderr. jax is imported once the arguments are known to be
well formed, so `--help` and wrong flags answer at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from mmtp_jax.config import DTYPES, CacheConfig, ConfigError, EngineConfig, require
from mmtp_jax.conversation import COMMANDS, Conversation, messages, note
from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.tokenizer import ChatTemplateError
from mmtp_jax.weights.errors import ModelError

if TYPE_CHECKING:
    from mmtp_jax.llm import LLM
    from mmtp_jax.loader import LoadedModel

# Arguments that are fields of EngineConfig and CacheConfig under the same names.
ENGINE_OPTIONS = (
    "dtype",
    "seed",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "load_format",
    "page_size",
    "num_pages",
    "memory_fraction",
    "enable_prefix_caching",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code: 0, 2 for what the user can correct, 130 after Ctrl-C."""
    args = _parser().parse_args(argv)
    warnings.formatwarning = lambda message, *_args, **_kwargs: f"warning: {message}\n"
    for stream in (sys.stdin, sys.stdout):
        # Text may not fit the terminal's encoding, or not be in it.
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        return _serve(args)
    except (ConfigError, ModelError, ChatTemplateError) as error:
        # What a chat template raises may have several lines.
        print("error:", *str(error).split(), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Nobody reads the answer any more; keep the interpreter from flushing into the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class _Parser(argparse.ArgumentParser):
    """Errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m mmtp_jax.serve",
        usage="%(prog)s [options]",
        description="Answer prompts on the terminal with a model and its MTP modules. "
        f"Without --prompt, every line of the input is a turn of one conversation; {COMMANDS}.",
        allow_abbrev=False,
    )

    def option(group: Any, *flags: str, help: str, **settings: Any) -> None:
        if settings.get("default") is not None:
            help += " (default: %(default)s)"
        if settings.get("type") in (int, float):
            settings["metavar"] = "N" if settings["type"] is int else "X"
        group.add_argument(*flags, help=help, **settings)

    engine, cache = EngineConfig, CacheConfig
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

    group = parser.add_argument_group("engine")
    help = "context in tokens (default: what the model and the cache hold)"
    option(group, "--max-model-len", type=int, help=help)
    default = engine.max_num_seqs
    option(group, "--max-num-seqs", type=int, default=default, help="requests that run at once")
    default = engine.max_num_batched_tokens
    option(group, "--max-num-batched-tokens", type=int, default=default, help="rows of one step")

    group = parser.add_argument_group("cache")
    option(group, "--page-size", type=int, default=cache.page_size, help="positions of a page")
    option(group, "--num-pages", type=int, help="pages of the cache (default: by memory)")
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
    option(group, "--speculative-config", type=_json_object, metavar="JSON", help=help)
    help = "0 turns speculation off (default: one for every MTP module of the checkpoint)"
    option(group, "--num-speculative-tokens", type=int, help=help)

    group = parser.add_argument_group("answers")
    text: dict[str, Any] = {"type": _text, "metavar": "TEXT"}
    option(group, "--prompt", **text, help="answer this and exit (default: read prompts)")
    option(group, "--system", **text, help="system message of the conversation")
    option(group, "--max-tokens", type=int, default=512, help="longest answer in tokens")
    option(group, "--temperature", type=float, default=0.0, help="0 is greedy")
    option(group, "--top-p", type=float, default=1.0, help="probability mass to sample from")
    help = "complete every prompt as it is (default: answer it as a turn of a chat)"
    group.add_argument("--no-chat-template", dest="chat", action="store_false", help=help)
    return parser


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return value


def _text(argument: str) -> str:
    """An argument as valid Unicode: bytes of another encoding become U+FFFD."""
    return os.fsencode(argument).decode(errors="replace")


def _speculative(given: dict[str, Any] | None, count: int | None) -> dict[str, Any] | None:
    """What --speculative-config and --num-speculative-tokens say together.

    Raises `ConfigError` if they contradict each other.
    """
    if count is None:
        return given
    given = given or {}
    other = 0 if given.get("method", "mtp") is None else given.get("num_speculative_tokens")
    require(
        other in (None, count),
        f"--num-speculative-tokens {count} contradicts the {other} of --speculative-config",
    )
    return given | {"num_speculative_tokens": count}


def _serve(args: argparse.Namespace) -> int:
    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, top_p=args.top_p
    )
    require(
        args.chat or args.system is None,
        "--system needs the chat template, which --no-chat-template turns off",
    )
    speculative = _speculative(args.speculative_config, args.num_speculative_tokens)

    from mmtp_jax.engine.programs import enable_compilation_cache
    from mmtp_jax.llm import LLM, engine_config
    from mmtp_jax.loader import load_model
    from mmtp_jax.weights.resolve import cache_directory

    options = {name: getattr(args, name) for name in ENGINE_OPTIONS}
    config = engine_config(args.model, speculative, **options)
    enable_compilation_cache(cache_directory() / "xla")
    loaded = load_model(config)
    # Known before anything compiles.
    chat = args.chat and _can_chat(loaded, args.system)
    with LLM.from_loaded(loaded, progress=True) as llm:
        note(_description(llm))
        conversation = Conversation(llm, params, chat, args.system)
        if args.prompt is not None:
            return 0 if conversation.answer(args.prompt) else 130
        conversation.run()
        return 0


def _can_chat(loaded: LoadedModel, system: str | None) -> bool:
    """Whether the model has a chat template; base models have none.

    Raises `ModelError` for a model without a tokenizer, and `ChatTemplateError` if the template
    cannot take `system`.
    """
    if loaded.tokenizer is None:
        raise ModelError(f"{loaded.config.model} has no tokenizer, so it cannot answer text")
    try:
        loaded.tokenizer.apply_chat_template(messages(system, [], ""))
    except ChatTemplateError as error:
        if system is not None:
            raise
        note(f"{error}: prompts are completed as they are")
        return False
    return True


def _description(llm: LLM) -> str:
    import jax

    from mmtp_jax.loader import parameter_dtype

    config, speculative = llm.config, llm.config.speculative
    modules = f"{speculative.modules_in_checkpoint}"
    if speculative.load_format == "dummy":
        modules += " (random)"
    pages = llm.core.cache.groups[0].num_pages - 1  # page 0 is the null page
    return (
        f"model {config.model}, dtype {parameter_dtype(config.dtype)},"
        f" device {jax.devices()[0].device_kind}, MTP modules {modules},"
        f" speculative tokens {speculative.num_modules}, context {llm.max_model_len},"
        f" pages {pages} of {config.cache.page_size}"
    )


if __name__ == "__main__":
    sys.exit(main())
