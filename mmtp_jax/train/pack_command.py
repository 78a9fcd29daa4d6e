"""The command `pack`: trained modules in the form in which they are shipped."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mmtp_jax.arguments import add_model_options, option
from mmtp_jax.config import EngineConfig, SpeculativeConfig
from mmtp_jax.progress import say


def add_pack(commands: Any) -> None:
    """Add the command's parser."""
    text = "store modules small, with the number of drafts to use by default"
    one = commands.add_parser("pack", help=text, description=text)
    group = one.add_argument_group("modules")
    folder: dict[str, Any] = {"type": Path, "required": True, "metavar": "DIR"}
    option(group, "--modules", **folder, help="the modules")
    option(group, "--out", **folder, help="where to store them")
    choices = ("int8", "bfloat16")
    option(group, "--storage", choices=choices, default=choices[0], help="of matrices")
    help = "drafts to recommend, of the first modules (default: as the modules say)"
    option(group, "--num-speculative-tokens", type=int, help=help)
    add_model_options(one)


def run_pack(args: argparse.Namespace) -> None:
    """Store the modules as the arguments say."""
    from mmtp_jax.loader import load_model
    from mmtp_jax.modules.checkpoint import open_modules, save_modules

    found = open_modules(args.modules)
    count = len(found.config.modules)
    config = EngineConfig(
        model=args.model,
        dtype="float32",
        hf_overrides=args.hf_overrides,
        speculative=SpeculativeConfig(model=str(args.modules), num_speculative_tokens=count),
    )
    loaded = load_model(config)
    save_modules(
        args.out,
        loaded.graph,
        loaded.params,
        storage=args.storage,
        num_speculative_tokens=args.num_speculative_tokens or found.num_speculative_tokens,
        facts=found.facts,
    )
    size = sum(file.stat().st_size for file in args.out.rglob("*") if file.is_file())
    say(f"{args.out}: {count} modules, {size / 1e6:.1f} MB")
