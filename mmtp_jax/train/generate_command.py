"""The command `generate`: training data, drawn from the target."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mmtp_jax.arguments import add_engine_options, engine_config_of, option
from mmtp_jax.progress import say
from mmtp_jax.prompt_files import JSON_LINES, TEXT_LINES, read_prompts
from mmtp_jax.train.samples import GenerateOptions

# A batch that is always full.
ENGINE_DEFAULTS = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}


def plain_unless_asked(args: argparse.Namespace) -> None:
    """No speculation unless an option asks for it: a full batch gains nothing from fewer steps of
    more rows each."""
    asked_for = (args.speculative_config, args.num_speculative_tokens, args.speculative_model)
    if asked_for == (None, None, None):
        args.speculative_config = {"method": None}


def add_generate(commands: Any) -> None:
    default = GenerateOptions()
    text = "answer prompts with the target and keep prompts and answers as training data"
    help = (
        f"{text}; a second run goes on where the first was interrupted."
        " Speculation is off unless options ask for it."
    )
    one = commands.add_parser("generate", help=text, description=help)
    group = one.add_argument_group("data")
    help = f"{', '.join(JSON_LINES + TEXT_LINES)}: an object or a line of text for each"
    file: dict[str, Any] = {"type": Path, "required": True}
    option(group, "--prompts", **file, nargs="+", metavar="FILE", help=help)
    option(group, "--out", **file, metavar="DIR", help="folder of the training data")
    help = "prompts to take from each file (default: all)"
    option(group, "--limit", type=int, help=help)
    help = "one sample or more of every prompt at each of these; 0 is greedy"
    several: dict[str, Any] = {"type": float, "nargs": "+", "default": list(default.temperatures)}
    option(group, "--temperatures", **several, help=help)
    for flag, value, help in (
        ("--samples", default.samples, "of every prompt at each temperature above 0"),
        ("--max-tokens", default.max_tokens, "longest answer in tokens"),
        ("--max-prompt-len", default.max_prompt_len, "longer prompts are skipped"),
        ("--shard-size", default.shard_size, "samples of one file"),
    ):
        option(group, flag, type=int, default=value, help=help)
    add_engine_options(one)
    one.set_defaults(**ENGINE_DEFAULTS)


def run_generate(args: argparse.Namespace) -> None:
    options = GenerateOptions(
        temperatures=tuple(args.temperatures),
        samples=args.samples,
        max_tokens=args.max_tokens,
        max_prompt_len=args.max_prompt_len,
        shard_size=args.shard_size,
        seed=args.seed,
    )
    plain_unless_asked(args)
    config = engine_config_of(args)
    prompts = [prompt for file in args.prompts for prompt in read_prompts(file, args.limit)]

    from mmtp_jax.engine.programs import enable_compilation_cache
    from mmtp_jax.loader import describe, load_model
    from mmtp_jax.train.generate import generate

    enable_compilation_cache()
    loaded = load_model(config, chat_template=args.chat_template)
    say(describe(loaded))
    done = generate(loaded, prompts, args.out, options, progress=True)
    say(
        f"{args.out}: {done.samples} samples of {done.tokens} tokens in {done.shards_written}"
        f" shard(s), {done.shards_found} shard(s) were there;"
        f" {done.prompts_skipped} of {len(prompts)} prompts had more than"
        f" {options.max_prompt_len} tokens and were skipped"
    )
