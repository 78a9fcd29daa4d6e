"""The command `python -m mmtp_jax.train`: from prompts to modules that draft for a frozen target.

`prompts` lets the target write prompts, `generate` draws training data, `fit` trains, `eval`
measures, `pack` makes the modules small. What they say goes to stderr. jax is imported once the
arguments are known to be well formed, so `--help` and wrong flags answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

from mmtp_jax.arguments import Parser, one_line
from mmtp_jax.config import ConfigError
from mmtp_jax.tokenizer import ChatTemplateError
from mmtp_jax.train.eval_command import add_eval, run_eval
from mmtp_jax.train.fit_command import add_fit, run_fit
from mmtp_jax.train.generate_command import add_generate, run_generate
from mmtp_jax.train.pack_command import add_pack, run_pack
from mmtp_jax.train.prompts_command import add_prompts, run_prompts
from mmtp_jax.weights.errors import ModelError

PROG = "python -m mmtp_jax.train"
INTERRUPTED = 130
COMMANDS = {
    "prompts": run_prompts,
    "generate": run_generate,
    "fit": run_fit,
    "eval": run_eval,
    "pack": run_pack,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code: 0, 2 for what the user can correct, 130 after Ctrl-C."""
    args = _parser().parse_args(argv)
    warnings.formatwarning = lambda message, *_args, **_kwargs: f"warning: {message}\n"
    try:
        COMMANDS[args.command](args)
    except (ConfigError, ModelError, ChatTemplateError) as error:
        print(one_line(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(PROG, "Train MTP modules for a frozen target.")
    commands = parser.add_subparsers(prog=PROG, dest="command", required=True, metavar="COMMAND")
    for add in (add_prompts, add_generate, add_fit, add_eval, add_pack):
        add(commands)
    return parser


if __name__ == "__main__":
    code = main()
    if code == INTERRUPTED:
        # The interpreter aborts if it ends while a computation runs, and there is nothing to wait
        # for: what counts is written.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
