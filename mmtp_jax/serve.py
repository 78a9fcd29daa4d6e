"""The command `python -m mmtp_jax.serve`: an OpenAI-compatible HTTP server.

jax is imported in the engine's process only, so `--help` and wrong options answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from mmtp_jax.arguments import Parser, add_engine_options, engine_config_of, one_line, option
from mmtp_jax.config import ConfigError, require
from mmtp_jax.server.logs import LEVELS
from mmtp_jax.server.run import ServerConfig, run_server
from mmtp_jax.tokenizer import ChatTemplateError
from mmtp_jax.weights.errors import ModelError

KEY_VARIABLE = "MMTP_API_KEY"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code: 0 after a signal, 1 if the engine died, 2 for what the user
    can correct."""
    args = _parser().parse_args(argv)
    try:
        return run_server(engine_config_of(args), _server_config(args))
    except (ConfigError, ModelError, ChatTemplateError) as error:
        print(one_line(error), file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "python -m mmtp_jax.serve",
        "Serve a model and its MTP modules over HTTP, as OpenAI's API does: /v1/completions,"
        " /v1/chat/completions, /v1/models, and /health, /metrics, /tokenize, /detokenize.",
    )
    server = ServerConfig()
    group = parser.add_argument_group("server")
    option(group, "--host", default=server.host, help="address to listen on")
    option(group, "--port", type=int, default=server.port, help="0 takes a free one")
    help = "names to answer to (default: what --model says)"
    option(group, "--served-model-name", nargs="+", metavar="NAME", help=help)
    help = f"clients must send it as a bearer token (default: {KEY_VARIABLE} of the environment)"
    option(group, "--api-key", metavar="KEY", help=help)
    help = "requests that may wait beyond --max-num-seqs; more are answered with 429"
    option(group, "--max-waiting", type=int, default=server.max_waiting, help=help)
    help = "largest body of a request"
    option(group, "--max-body-bytes", type=int, default=server.max_body_bytes, help=help)
    help = "seconds that open requests get to end after SIGTERM"
    option(group, "--grace-seconds", type=float, default=server.grace_seconds, help=help)

    add_engine_options(parser)

    group = parser.add_argument_group("observation")
    help = "write traces of jax.profiler there: POST /start_profile and /stop_profile"
    option(group, "--profile-dir", metavar="DIR", help=help)
    option(group, "--log-level", choices=LEVELS, default=server.log_level, help="what to log")
    group.add_argument("--json-logs", action="store_true", help="log one JSON object per line")
    help = "log prompts and answers too (they are in no log otherwise)"
    group.add_argument("--log-requests", action="store_true", help=help)
    return parser


def _server_config(args: argparse.Namespace) -> ServerConfig:
    require(0 <= args.port <= 65535, f"--port must be in [0, 65535], got {args.port}")
    require(args.max_waiting >= 0, f"--max-waiting must be >= 0, got {args.max_waiting}")
    require(args.max_body_bytes > 0, f"--max-body-bytes must be > 0, got {args.max_body_bytes}")
    require(
        0 <= args.grace_seconds <= 86400,
        f"--grace-seconds must be in [0, 86400], got {args.grace_seconds}",
    )
    key = os.environ.get(KEY_VARIABLE) if args.api_key is None else args.api_key
    require(key is None or bool(key), "--api-key must not be empty")
    names = tuple(args.served_model_name or ())
    require(all(names), "--served-model-name must not be empty")
    return ServerConfig(
        host=args.host,
        port=args.port,
        model_names=names,
        api_key=key,
        chat_template=args.chat_template,
        max_waiting=args.max_waiting,
        max_body_bytes=args.max_body_bytes,
        grace_seconds=args.grace_seconds,
        profile_directory=args.profile_dir,
        log_level=args.log_level,
        json_logs=args.json_logs,
        log_requests=args.log_requests,
    )


if __name__ == "__main__":
    sys.exit(main())
