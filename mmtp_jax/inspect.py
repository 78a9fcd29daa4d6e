"""`python -m mmtp_jax.inspect DIR`: what a checkpoint is and takes, without loading its weights.

Exit code 1 if it would be refused; what is wrong is printed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.filesize import decimal

from mmtp_jax.arguments import (
    Parser,
    add_model_options,
    add_modules_option,
    one_line,
    option,
)
from mmtp_jax.config import CacheConfig, ConfigError, EngineConfig, SpeculativeConfig
from mmtp_jax.describe import describe_cache, describe_model
from mmtp_jax.loader import parameter_dtype
from mmtp_jax.models.model import model_graph
from mmtp_jax.modules.checkpoint import open_modules
from mmtp_jax.modules.default import with_default_modules
from mmtp_jax.modules.reader import ModelReader, target_only
from mmtp_jax.weights.checkpoint import open_checkpoint
from mmtp_jax.weights.errors import ModelError
from mmtp_jax.weights.load import problems, shortened
from mmtp_jax.weights.resolve import resolve_model


def inspect(config: EngineConfig, context: int | None = None) -> tuple[list[str], list[str]]:
    """A description of `config.model` with its modules, and what keeps it from being loaded.

    `context` None means the model's own. Raises `ModelError` or `ConfigError` where there is no
    model to describe.
    """
    config = with_default_modules(config)
    with_weights = config.load_format != "dummy"
    checkpoint = open_checkpoint(
        resolve_model(config.model), config.hf_overrides, with_weights=with_weights
    )
    model, modules, stored = checkpoint.config, None, []
    if config.speculative.model is not None:
        modules = open_modules(config.speculative.model)
        model = modules.beside(model)
        stored = [
            f"modules from  {modules.folder}, {modules.storage},"
            f" {modules.num_speculative_tokens} speculative tokens recommended"
        ]
    graph = model_graph(model)
    lines = [*describe_model(graph), *stored]
    dtype = parameter_dtype(config.dtype)
    total = sum(leaf.num_values * leaf.dtype(dtype).itemsize for leaf in graph.leaves())
    lines.append(f"weights       {decimal(total)} as {dtype}")
    lines += describe_cache(graph, config, dtype, context or model.max_position)
    refused = []
    if with_weights:
        shapes = graph.shapes()
        own = (model, shapes) if modules is None else target_only(model, shapes)
        found = problems(checkpoint, *own)
        refused = [f"the checkpoint {problem} {shortened(names)}" for problem, names in found]
    if modules is not None and not refused:
        try:
            ModelReader(checkpoint, model, graph.shapes(), modules)
        except ModelError as error:
            refused = [str(error)]
    return lines, refused


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    parser = Parser(
        "mmtp_jax.inspect", "Print what a checkpoint is and takes, without loading its weights."
    )
    parser.usage = "%(prog)s [DIR] [options]"
    group = add_model_options(parser)
    parser.add_argument("directory", nargs="?", help="the same as --model")
    add_modules_option(group)
    option(group, "--max-model-len", type=int, help="context to give the memory of")
    default = CacheConfig.page_size
    option(group, "--page-size", type=int, default=default, help="positions of a page")
    args = parser.parse_args(arguments)
    try:
        config = EngineConfig(
            model=args.directory or args.model,
            dtype=args.dtype,
            load_format=args.load_format,
            hf_overrides=args.hf_overrides,
            max_model_len=args.max_model_len,
            cache=CacheConfig(page_size=args.page_size),
            speculative=SpeculativeConfig(model=args.speculative_model),
        )
        lines, refused = inspect(config, config.max_model_len)
    except (ModelError, ConfigError) as error:
        print(one_line(error), file=sys.stderr)
        return 1
    print("\n".join(lines))
    for reason in refused:
        print(f"refused       {reason}")
    return int(bool(refused))


if __name__ == "__main__":
    sys.exit(main())
