"""The command `eval`: tokens per verification, real and expected, on sets of prompts."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mmtp_jax.arguments import add_engine_options, engine_config_of, option, require_writable
from mmtp_jax.config import ConfigError
from mmtp_jax.progress import say
from mmtp_jax.prompt_files import JSON_LINES, TEXT_LINES, read_prompts
from mmtp_jax.train.options import EvaluateOptions


def add_eval(commands: Any) -> None:
    """Add the command's parser."""
    text = "count the tokens that a verification emits, and compare with the texts"
    help = f"{text}: JSON on stdout, a table on stderr"
    one = commands.add_parser("eval", help=text, description=help)
    group = one.add_argument_group("measurement")
    help = f"{', '.join(JSON_LINES + TEXT_LINES)}: an object or a line of text for each"
    file: dict[str, Any] = {"type": Path, "metavar": "FILE"}
    option(group, "--prompts", **file, required=True, nargs="+", help=help)
    default = EvaluateOptions()
    several: dict[str, Any] = {"type": float, "nargs": "+", "default": list(default.temperatures)}
    option(group, "--temperatures", **several, help="0 is greedy")
    help = "longest answer in tokens"
    option(group, "--max-tokens", type=int, default=default.max_tokens, help=help)
    option(group, "--limit", type=int, help="prompts of each file (default: all)")
    option(group, "--json", **file, help="write the results here too")
    add_engine_options(one)
    one.set_defaults(max_num_seqs=64, max_num_batched_tokens=2048)


def run_eval(args: argparse.Namespace) -> None:
    """Evaluate as the arguments say."""
    config = engine_config_of(args)
    options = EvaluateOptions(tuple(args.temperatures), args.max_tokens, args.limit, args.seed)
    sets = {path.name.split(".")[0]: read_prompts(path, args.limit) for path in args.prompts}
    if len(sets) < len(args.prompts):
        raise ConfigError("--prompts must be files of different names")
    require_writable(args.json)

    from mmtp_jax.engine.programs import enable_compilation_cache
    from mmtp_jax.loader import describe, load_model
    from mmtp_jax.train.evaluate import evaluate
    from mmtp_jax.train.report import evaluation_table
    from pallas_kernels.bench.output import environment, show, write_facts

    enable_compilation_cache()
    loaded = load_model(config, chat_template=args.chat_template)
    say(describe(loaded))
    facts = environment("python -m mmtp_jax.train", sys.argv[1:]) | {
        "dtype": str(loaded.graph.dtype(loaded.params)),
        "results": [],
    }
    results = []
    for result in evaluate(loaded, sets, options):
        results.append(result)
        facts["results"].append(asdict(result))
        say(
            f"{result.prompts} T={result.temperature:g}: {result.tokens_per_step:.3f} tokens per"
            f" step, {result.expected_tokens_per_step[-1]:.3f} expected"
        )
        write_facts(args.json, facts)  # after each, in case the command is cut short
    show(evaluation_table(results))
    print(json.dumps(facts, indent=1))
