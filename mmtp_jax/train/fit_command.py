"""The command `fit`: train modules on data that `generate` drew."""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from mmtp_jax.arguments import add_model_options, option
from mmtp_jax.config import EngineConfig, SpeculativeConfig, require
from mmtp_jax.progress import say
from mmtp_jax.train.options import BatchOptions, FitOptions, NewModules, Objective


def add_fit(commands: Any) -> None:
    """Add the command's parser."""
    text = "train modules on data of the target"
    help = f"{text}, on every device there is; a second run goes on where the first stopped"
    one = commands.add_parser("fit", help=text, description=help)
    group = one.add_argument_group("data")
    folder: dict[str, Any] = {"type": Path, "metavar": "DIR"}
    help = "folders of training data"
    option(group, "--data", **folder, required=True, nargs="+", help=help)
    help = "folder of the training: its state, its log and the modules"
    option(group, "--out", **folder, required=True, help=help)
    help = "tokens of a step on one device, padding included"
    option(group, "--batch-tokens", type=int, default=BatchOptions.batch_tokens, help=help)
    add_model_options(one)

    new = NewModules
    group = one.add_argument_group("modules")
    help = "begin with these modules, not with new ones"
    option(group, "--from", **folder, dest="start", help=help)
    option(group, "--num-modules", type=int, default=new.num_modules, help="new modules")
    help = "width of the new modules' MLPs (default: that of the target's last layer)"
    option(group, "--mlp-size", type=int, help=help)
    help = (
        "what new modules begin as: copies of the target's last layer behind a projection fitted to"
        " the data or a random one, or all random"
    )
    initials = ("fitted", "last_layer", "random")
    option(group, "--initial", choices=initials, default=new.initial, help=help)

    group = one.add_argument_group("objective")
    _add_numbers(
        group,
        Objective,
        distill="weight of the divergence from the target's distribution",
        cross_entropy="weight of the cross-entropy of the tokens",
        decay="weight of a module, relative to the one before",
        top_k="of the target's distribution, only so many best tokens; 0: all",
        overlap="weight of the negative logarithm of how likely a draft is accepted",
        reach="share of a weight that falls with the chance that the drafts before are accepted",
    )
    group = one.add_argument_group("optimisation")
    option(group, "--steps", type=int, help="stop after so many steps (default: by --epochs)")
    optimizers = ("adamw", "muon")
    help = "of matrices; all else is AdamW's"
    option(group, "--optimizer", choices=optimizers, default=FitOptions.optimizer, help=help)
    _add_numbers(
        group,
        FitOptions,
        epochs="times that the data are seen",
        learning_rate="after the warm-up",
        final_rate="at the end, relative to --learning-rate",
        warmup="steps up to the full learning rate",
        weight_decay="of matrices",
        clip="largest norm of the derivatives",
        held_out="greedy samples to draft instead of training on them",
        log_every="steps between lines of the log",
        save_every="steps between states to go on from",
        eval_every="steps between drafts of the held-out samples",
    )


def _add_numbers(group: Any, options: Any, **helps: str) -> None:
    """Flags for fields of a class of options, with its defaults."""
    for name, help in helps.items():
        default = getattr(options, name)
        flag = f"--{name.replace('_', '-')}"
        option(group, flag, type=type(default), default=default, help=help)


def run_fit(args: argparse.Namespace) -> None:
    """Train as the arguments say."""
    from mmtp_jax.engine.programs import enable_compilation_cache
    from mmtp_jax.loader import load_model
    from mmtp_jax.modules.checkpoint import open_modules
    from mmtp_jax.train.fit import check_data, fit
    from mmtp_jax.train.held_out import split
    from mmtp_jax.train.initial import with_new_modules
    from mmtp_jax.train.shards import Dataset

    options = FitOptions(**{field.name: getattr(args, field.name) for field in fields(FitOptions)})
    batches = BatchOptions(args.batch_tokens, args.seed)
    objective = Objective(**{field.name: getattr(args, field.name) for field in fields(Objective)})
    new = NewModules(args.num_modules, args.mlp_size, args.initial, args.seed)
    require(
        args.tensor_parallel_size == 1,
        "tensor_parallel_size must be 1: every device has its own sequences",
    )
    data = Dataset.open(*args.data)
    speculative, start = SpeculativeConfig(method=None), None
    if args.start is not None:
        start = str(args.start)
        count = open_modules(start).config.num_modules
        speculative = SpeculativeConfig(model=start, num_speculative_tokens=count)
    config = EngineConfig(
        model=args.model,
        dtype=args.dtype,
        seed=args.seed,
        load_format=args.load_format,
        hf_overrides=args.hf_overrides,
        speculative=speculative,
    )
    enable_compilation_cache()
    loaded = load_model(config)
    graph, params = loaded.graph, loaded.params
    check_data(graph.config, data)
    parts = split(data, options.held_out)
    made: dict[str, Any] = {"from": start}
    if start is None:
        graph, params = with_new_modules(graph, params, new, data, parts.trained, batches)
        made = asdict(new)
    facts = {"model": args.model, "dtype": str(graph.dtype(params)), **made}
    folder = fit(graph, params, data, parts, args.out, options, batches, objective, facts, say)
    say(f"the modules are in {folder}")
