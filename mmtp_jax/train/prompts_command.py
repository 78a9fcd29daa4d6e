"""The command `prompts`: prompts for `generate`, written by the target."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mmtp_jax.arguments import add_engine_options, engine_config_of, option
from mmtp_jax.progress import say
from mmtp_jax.prompt_files import JSON_LINES, TEXT_LINES, read_prompts
from mmtp_jax.train.generate_command import ENGINE_DEFAULTS, plain_unless_asked
from mmtp_jax.train.samples import GenerateOptions

_SAMPLES = 10000
_TEMPERATURES = (0.7, 1.0)
_MAX_TOKENS = 256


def add_prompts(commands: Any) -> None:
    """Add the command's parser."""
    text = "let the target write prompts for `generate`: what it expects users to ask"
    help = f"{text}; a second run goes on where the first was interrupted."
    one = commands.add_parser("prompts", help=text, description=help)
    group = one.add_argument_group("prompts")
    help = f"file of the prompts: {' or '.join(JSON_LINES)}"
    option(group, "--out", type=Path, required=True, metavar="FILE", help=help)
    help = "messages to draw at each temperature; some are dropped"
    option(group, "--samples", type=int, default=_SAMPLES, help=help)
    several: dict[str, Any] = {"nargs": "+", "default": list(_TEMPERATURES)}
    option(group, "--temperatures", type=float, **several, help="above 0")
    help = "messages that do not end within so many tokens are dropped"
    option(group, "--max-tokens", type=int, default=_MAX_TOKENS, help=help)
    help = (
        "drop what shares 13 words in a row with a prompt of these, such as evaluation sets:"
        f" {', '.join(JSON_LINES + TEXT_LINES)}"
    )
    option(group, "--exclude", type=Path, nargs="+", default=[], metavar="FILE", help=help)
    add_engine_options(one)
    one.set_defaults(**ENGINE_DEFAULTS)


def run_prompts(args: argparse.Namespace) -> None:
    """Draw prompts as the arguments say."""
    options = GenerateOptions(
        temperatures=tuple(args.temperatures),
        samples=args.samples,
        max_tokens=args.max_tokens,
        seed=args.seed,
    )
    plain_unless_asked(args)
    config = engine_config_of(args)
    exclude = [prompt for file in args.exclude for prompt in read_prompts(file)]

    from mmtp_jax.engine.programs import enable_compilation_cache
    from mmtp_jax.loader import describe, load_model
    from mmtp_jax.train.own_prompts import write_own_prompts

    enable_compilation_cache()
    loaded = load_model(config, chat_template=args.chat_template)
    say(describe(loaded))
    kept = write_own_prompts(loaded, args.out, options, exclude, progress=True)
    say(
        f"{args.out}: {len(kept.texts)} prompts; dropped {kept.unfinished} unfinished,"
        f" {kept.unusable} unusable, {kept.repeated} repeated and {kept.excluded} excluded ones"
    )
