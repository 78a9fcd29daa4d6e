"""The command: `latency`, `throughput`, `startup`, `serving`. JSON on stdout, tables on stderr."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from mmtp_jax.arguments import Parser, one_line, require_writable
from mmtp_jax.bench.serving.command import add_serving
from mmtp_jax.config import ConfigError
from mmtp_jax.weights.errors import ModelError

PROG = "python -m mmtp_jax.bench"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code: 0, 2 for what the user can correct, for `serving` also 1 if
    no request was answered, and 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser(argv).parse_args(argv)
    try:
        require_writable(arguments.json)
        facts, code = arguments.run(arguments, argv)
    except (ModelError, ConfigError) as error:
        print(one_line(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(json.dumps(facts, indent=1))
    return int(code)


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = Parser(PROG, "Measure the engine, or any server.")
    commands = parser.add_subparsers(prog=PROG, dest="command", required=True, metavar="COMMAND")
    if list(argv[:1]) != ["serving"]:
        # Imports jax, which those who measure another server need not have.
        from mmtp_jax.bench.engine_commands import add_engine_commands

        add_engine_commands(commands)
    add_serving(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
