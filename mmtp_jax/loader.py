"""From a model name to parameters on the device: resolve, configure, load."""

from __future__ import annotations

import dataclasses
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mmtp_jax.config import LARGE, SMALL, EngineConfig, require
from mmtp_jax.engine.sizes import fit_model_len
from mmtp_jax.models.model import (
    ModelGraph,
    Params,
    assemble,
    model_graph,
    random_value,
)
from mmtp_jax.models.sharding import tensor_mesh
from mmtp_jax.modules.checkpoint import ModuleCheckpoint, open_modules
from mmtp_jax.modules.default import with_default_modules
from mmtp_jax.modules.reader import ModelReader, target_only
from mmtp_jax.progress import LoadingBar
from mmtp_jax.specs import ModelConfig, MTPConfig
from mmtp_jax.tokenizer import Tokenizer, load_tokenizer
from mmtp_jax.weights.checkpoint import Checkpoint, open_checkpoint
from mmtp_jax.weights.resolve import resolve_model


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for an engine; `config.speculative` is resolved for this checkpoint."""

    config: EngineConfig
    graph: ModelGraph
    params: Params
    tokenizer: Tokenizer | None
    max_model_len: int


def load_model(config: EngineConfig, *, chat_template: str | None = None) -> LoadedModel:
    """Load `config.model` and its modules; `chat_template` replaces the model's own
    (`ChatTemplateError` if it is none).

    Raises `ModelError` if the model cannot be had or does not fit its description, `ConfigError` if
    the configuration asks for what the model does not offer.
    """
    warn_about_unused_gpu()
    config = with_default_modules(config)
    checkpoint = open_checkpoint(
        resolve_model(config.model),
        config.hf_overrides,
        with_weights=config.load_format != "dummy",
    )
    described, modules, recommended = checkpoint.config, None, None
    if config.speculative.model is not None:
        modules = open_modules(config.speculative.model)
        described = modules.beside(described)
        recommended = modules.num_speculative_tokens
    speculative = config.speculative.resolved(described.mtp, recommended)
    limits = config.within(SMALL if jax.default_backend() == "cpu" else LARGE)
    config = dataclasses.replace(config, speculative=speculative, **limits._asdict())
    model = model_for(config, described)
    graph = model_graph(model, tensor_mesh(config.tensor_parallel_size))
    dtype = parameter_dtype(config.dtype)
    max_model_len = _max_model_len(config, graph, dtype)
    tokenizer = load_tokenizer(checkpoint.tokenizer_source, chat_template)
    params = _parameters(config, checkpoint, modules, graph, dtype)
    return LoadedModel(config, graph, params, tokenizer, max_model_len)


def describe(loaded: LoadedModel) -> str:
    """What was loaded, in one line."""
    config, speculative = loaded.config, loaded.config.speculative
    modules = f"{speculative.modules_in_checkpoint}"
    if speculative.load_format == "dummy":
        modules += " (random)"
    elif speculative.model is not None:
        modules += f" ({speculative.model})"
    return (
        f"model {config.model}, dtype {parameter_dtype(config.dtype)},"
        f" device {jax.devices()[0].device_kind}, MTP modules {modules},"
        f" speculative tokens {speculative.num_drafts}, context {loaded.max_model_len}"
    )


def model_for(config: EngineConfig, checkpoint: ModelConfig) -> ModelConfig:
    """The model that is built: the target with the modules that `speculative` uses.

    Random modules for a checkpoint without any copy its last layer's shape and the wiring of
    MiMo-7B (model card), which other engines can load.
    """
    speculative = config.speculative
    if speculative.num_modules == 0:
        return dataclasses.replace(checkpoint, mtp=None)
    mtp = checkpoint.mtp or MTPConfig((checkpoint.layers[-1],) * speculative.num_modules)
    return dataclasses.replace(checkpoint, mtp=mtp.drafting(speculative.num_drafts))


def parameter_dtype(name: str) -> np.dtype:
    """The dtype of parameters and cache: "auto" is bfloat16 on an accelerator, float32 on a CPU."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def warn_about_unused_gpu() -> None:
    """Warn when the machine has an NVIDIA GPU but jax runs on the CPU (as far as one can see)."""
    platforms = jax.config.jax_platforms or ""
    if jax.default_backend() != "cpu" or "cpu" in platforms.split(","):
        return
    if Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi"):
        warnings.warn(
            "this machine seems to have an NVIDIA GPU, but jax cannot use it and runs on the CPU:"
            " install the CUDA wheels with pip install -e '.[cuda13]'",
            stacklevel=2,
        )


def _max_model_len(config: EngineConfig, graph: ModelGraph, dtype: np.dtype) -> int:
    limit = graph.config.max_position
    if config.max_model_len is not None:
        require(
            config.max_model_len <= limit,
            f"max_model_len must be <= {limit} for this model, got {config.max_model_len}",
        )
        return config.max_model_len
    return fit_model_len(graph.layout, config, dtype, limit)


def _parameters(
    config: EngineConfig,
    checkpoint: Checkpoint,
    modules: ModuleCheckpoint | None,
    graph: ModelGraph,
    dtype: np.dtype,
) -> Params:
    random = random_value(graph, config.seed, dtype)
    if config.load_format == "dummy":
        return assemble(graph, random)
    model, shapes = graph.config, graph.shapes()
    if config.speculative.load_format == "dummy":  # random modules
        model, shapes = target_only(model, shapes)
    reader = ModelReader(checkpoint, model, shapes, modules)
    dtypes = {name: leaf.dtype(dtype) for leaf in graph.leaves() for name in leaf.names}
    with LoadingBar(len(dtypes)) as bar:

        def value(name: str) -> np.ndarray | jax.Array:
            bar.update()
            return reader.read(name, dtypes[name]) if name in shapes else random(name)

        return assemble(
            graph, value, order=lambda name: reader.position(name) if name in shapes else 0
        )
