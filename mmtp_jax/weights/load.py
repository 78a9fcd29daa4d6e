"""Fill the parameters of a model from a checkpoint, strictly."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from mmtp_jax.config import ModelConfig
from mmtp_jax.weights.checkpoint import Checkpoint
from mmtp_jax.weights.errors import ModelError
from mmtp_jax.weights.names import EMBEDDING, HEAD, TensorSource, module_index, parameter_sources

_LISTED = 5


def load_parameters(
    checkpoint: Checkpoint,
    config: ModelConfig,
    expected: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
) -> dict[str, np.ndarray]:
    """Read every parameter in `expected` (shape by path) as `dtype`, keyed by path.

    `config` may have fewer MTP modules than the checkpoint: the tensors of the others are never
    read. Tensors are read, transposed and converted one at a time, so that the host holds the
    result and one tensor. Raises `ModelError` when a tensor is missing, has another shape, or would
    be left unused (only `rotary_emb.inv_freq` and the head of a tied model may be).
    """
    sources = _checked_sources(checkpoint.names(), config, expected)
    parameters: dict[str, np.ndarray] = {}
    with _progress() as progress:
        for path in progress.track(expected, description="Loading weights"):
            source = sources[path]
            tensor = checkpoint.read(source.name)
            parameters[path] = np.ascontiguousarray(tensor.T if source.transpose else tensor, dtype)
    return parameters


def _checked_sources(
    shapes: Mapping[str, tuple[int, ...]],
    config: ModelConfig,
    expected: Mapping[str, tuple[int, ...]],
) -> dict[str, TensorSource]:
    """The source of every expected parameter, once all names and shapes were found to agree."""
    sources = parameter_sources(config)
    missing, different = [], []
    for path, shape in expected.items():
        if path not in sources:
            raise ModelError(
                f"no tensor of a {config.family} checkpoint fills the parameter {path}"
            )
        source = sources[path]
        wanted = tuple(reversed(shape)) if source.transpose else tuple(shape)
        if source.name not in shapes:
            missing.append(source.name)
        elif shapes[source.name] != wanted:
            different.append(f"{source.name} is {shapes[source.name]} but must be {wanted}")
    used = {sources[path].name for path in expected}
    unused = [name for name in shapes if name not in used and not _ignorable(name, shapes, config)]
    for problem, names in (
        ("lacks the tensors", missing),
        ("has tensors of the wrong shape:", different),
        ("has tensors that this model does not use:", unused),
    ):
        if names:
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            raise ModelError(f"the checkpoint {problem} {', '.join(names[:_LISTED])}{more}")
    return sources


def _ignorable(name: str, shapes: Mapping[str, tuple[int, ...]], config: ModelConfig) -> bool:
    if name.endswith("rotary_emb.inv_freq"):
        return True
    if name == HEAD:
        # Some tied checkpoints still store the head; it must then be the embedding once more.
        return config.tie_embeddings and shapes[HEAD] == shapes.get(EMBEDDING)
    module = module_index(name)
    return module is not None and module >= config.num_modules


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
