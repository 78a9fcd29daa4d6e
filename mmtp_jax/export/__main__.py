"""`python -m mmtp_jax.export --format mimo DIR`: a target and its modules for other engines.

Exit code 2 for what the user can correct.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.filesize import decimal

from mmtp_jax.arguments import Parser, add_modules_option, one_line, option
from mmtp_jax.config import ConfigError, EngineConfig, engine_config
from mmtp_jax.export.write import DTYPES, export_mimo
from mmtp_jax.weights.errors import ModelError


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    parser = Parser(
        "python -m mmtp_jax.export",
        "Write a model and its MTP modules as a Hugging Face directory that other engines load.",
    )
    parser.usage = "%(prog)s --format mimo DIR [options]"
    parser.add_argument("directory", type=Path, metavar="DIR", help="new or empty directory")
    help = "mimo: that of MiMo-7B, with as many modules as there are"
    option(parser, "--format", choices=("mimo",), required=True, help=help)
    help = "known name, directory, .gguf file or hub id"
    option(parser, "--model", default=EngineConfig.model, help=help)
    add_modules_option(parser)
    option(parser, "--dtype", choices=DTYPES, default=DTYPES[0], help="of all tensors")
    args = parser.parse_args(arguments)
    try:
        speculative = {"model": args.speculative_model}
        config = engine_config(args.model, speculative, dtype=args.dtype)
        modules, size = export_mimo(args.directory, config)
    except (ModelError, ConfigError) as error:
        print(one_line(error), file=sys.stderr)
        return 2
    print(f"{args.directory}: {modules} MTP modules, {decimal(size)} as {args.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
