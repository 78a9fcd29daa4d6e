"""What untrained modules begin as.

A module is a layer that sees the target's hidden state and the next token: the target's own last
layer, behind a projection of both, is close to what it has to become.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from mmtp_jax.models.model import ModelGraph, Params, assemble, model_graph, random_value
from mmtp_jax.specs import DenseSpec, MTPConfig
from mmtp_jax.train.fusion import fitted_fusions
from mmtp_jax.train.options import BatchOptions, NewModules
from mmtp_jax.train.shards import Dataset

# Samples that the projections are fitted to.
_FITTED_TO = 256


def with_new_modules(
    target: ModelGraph,
    params: Params,
    options: NewModules,
    data: Dataset,
    chosen: Sequence[int] | np.ndarray,
    batches: BatchOptions,
) -> tuple[ModelGraph, Params]:
    """The target with modules, whose values are a function of the target, the options and, for
    "fitted" ones, the chosen samples."""
    config = target.config
    layer = config.layers[-1]
    if options.mlp_size is not None:
        layer = replace(layer, mlp=DenseSpec(options.mlp_size))
    graph = model_graph(replace(config, mtp=MTPConfig((layer,) * options.num_modules)))
    known = target.values(params)
    random = random_value(graph, options.seed, target.dtype(params))
    shapes = graph.shapes()
    last = f"layers.{len(config.layers) - 1}."
    fusions = None
    if options.initial == "fitted":
        fusions = fitted_fusions(target, params, data, chosen[:_FITTED_TO], batches)

    def value(name: str) -> jax.Array:
        if name in known:
            return known[name]
        found = random(name)
        if options.initial == "random":
            return found
        _, module, own = name.split(".", 2)
        if own == "norm.scale":
            return known["norm.scale"]
        if own in ("token_norm.scale", "hidden_norm.scale"):
            return jnp.full_like(found, 1.0 if config.norm_style == "plain" else 0.0)
        if own == "fuse.kernel":
            # The first module is fed before the target's norm, the others after their own.
            return found if fusions is None else jnp.asarray(fusions[module != "0"], found.dtype)
        of_last = known.get(last + own.removeprefix("layer."))
        return found if of_last is None or of_last.shape != shapes[name] else of_last

    return graph, assemble(graph, value)
