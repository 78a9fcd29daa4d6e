"""The command `python -m mmtp_jax.chat`: load a model and answer on the terminal.

Answers go to stdout, everything else to stderr. jax is imported once the arguments are known to be
well formed, so `--help` and wrong flags answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mmtp_jax.arguments import (
    Parser,
    add_engine_options,
    engine_config_of,
    one_line,
    option,
    unicode_text,
)
from mmtp_jax.config import ConfigError, require
from mmtp_jax.conversation import COMMANDS, Conversation, messages, note
from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.tokenizer import ChatTemplateError
from mmtp_jax.weights.errors import ModelError

if TYPE_CHECKING:
    from mmtp_jax.loader import LoadedModel


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code: 0, 2 for what the user can correct, 130 after Ctrl-C."""
    args = _parser().parse_args(argv)
    warnings.formatwarning = lambda message, *_args, **_kwargs: f"warning: {message}\n"
    for stream in (sys.stdin, sys.stdout):
        # Text may not fit the terminal's encoding, or not be in it.
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        return _chat(args)
    except (ConfigError, ModelError, ChatTemplateError) as error:
        print(one_line(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Nobody reads the answer any more; keep the interpreter from flushing into the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "python -m mmtp_jax.chat",
        "Answer prompts on the terminal with a model and its MTP modules. "
        f"Without --prompt, every line of the input is a turn of one conversation; {COMMANDS}.",
    )
    add_engine_options(parser)
    group = parser.add_argument_group("answers")
    text: dict[str, Any] = {"type": unicode_text, "metavar": "TEXT"}
    option(group, "--prompt", **text, help="answer this and exit (default: read prompts)")
    option(group, "--system", **text, help="system message of the conversation")
    option(group, "--max-tokens", type=int, default=512, help="longest answer in tokens")
    option(group, "--temperature", type=float, default=0.0, help="0 is greedy")
    option(group, "--top-p", type=float, default=1.0, help="probability mass to sample from")
    help = "complete every prompt as it is (default: answer it as a turn of a chat)"
    group.add_argument("--no-chat-template", dest="chat", action="store_false", help=help)
    return parser


def _chat(args: argparse.Namespace) -> int:
    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, top_p=args.top_p
    )
    require(
        args.chat or args.system is None,
        "--system needs the chat template, which --no-chat-template turns off",
    )
    config = engine_config_of(args)

    from mmtp_jax.engine.programs import enable_compilation_cache
    from mmtp_jax.llm import LLM
    from mmtp_jax.loader import describe, load_model

    enable_compilation_cache()
    loaded = load_model(config, chat_template=args.chat_template)
    # Known before anything compiles.
    chat = args.chat and _can_chat(loaded, args.system)
    with LLM.from_loaded(loaded, progress=True) as llm:
        pages = llm.core.cache.groups[0].num_pages - 1  # page 0 is the null page
        note(f"{describe(loaded)}, pages {pages} of {config.cache.page_size}")
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


if __name__ == "__main__":
    sys.exit(main())
