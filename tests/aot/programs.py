"""Steps of models at the widths of released ones, with few layers, compiled for an H200."""

from __future__ import annotations

import copy
import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from mmtp_jax.bench.presets import ARCHITECTURES, write_config
from mmtp_jax.engine.buckets import Bucket
from mmtp_jax.engine.plan import StepPlan
from mmtp_jax.engine.programs import product_options
from mmtp_jax.engine.state import AdmissionArrays, EngineState, admit, initial_state
from mmtp_jax.engine.step import StepShape, step
from mmtp_jax.models.model import model_graph
from mmtp_jax.sampling.sampler import sample
from mmtp_jax.specs import (
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    ModelConfig,
    MTPConfig,
    RopeConfig,
)
from mmtp_jax.weights.checkpoint import open_checkpoint
from pallas_kernels.aot import Report, compile_for_h200, missing

needs_compiler = pytest.mark.skipif(missing() is not None, reason=str(missing()))

DTYPE = jnp.dtype("bfloat16")
REQUESTS = 8


def smollm2(num_layers: int, num_modules: int) -> ModelConfig:
    """As many layers and modules as wanted, like those of SmolLM2-135M."""
    attention = AttentionSpec(9, 3, 64, RopeConfig(64, theta=100000.0))
    layer = LayerSpec(attention, DenseSpec(1536))
    return ModelConfig(
        "llama",
        49152,
        576,
        (layer,) * num_layers,
        8192,
        tie_embeddings=True,
        eos_token_ids=(2,),
        mtp=MTPConfig((layer,) * num_modules) if num_modules else None,
    )


def inkling() -> ModelConfig:
    """A local dense and a global layer of experts, and a module of each kind of attention, at the
    widths of the benchmark's Inkling."""
    described = copy.deepcopy(ARCHITECTURES["inkling-2b"])
    described["text_config"] |= {
        "num_hidden_layers": 2,
        "dense_mlp_idx": 1,
        "local_layer_ids": [0],
    }
    described["mtp_config"] = {"num_nextn_predict_layers": 2, "local_layer_ids": [0]}
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), described)
        return open_checkpoint(Path(folder), {}, with_weights=False).config


@dataclass(frozen=True)
class Compiled:
    """What came out, and the state that the step updates."""

    report: Report
    state: EngineState
    vocab_size: int

    def page_arrays(self) -> list[jax.ShapeDtypeStruct]:
        arrays: list[jax.ShapeDtypeStruct] = jax.tree.leaves(self.state.pages)
        return arrays

    def state_bytes(self) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.state))


def compile_step(config: ModelConfig, chunk: int = 0) -> Compiled:
    """The engine's program for a window of every request, and a prompt's chunk of so many rows
    beside them."""
    graph = model_graph(config)
    width, num_groups = config.num_drafts + 1, len(graph.layout.groups)
    num_rows = REQUESTS * width + chunk
    bucket = Bucket(
        config.num_drafts, num_rows, REQUESTS, REQUESTS * width, 3 * REQUESTS * num_groups
    )
    state = _state(config, num_rows)
    params = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype(DTYPE)) for leaf in graph.leaves())
    shape = StepShape(num_rows, config.num_drafts, width, bucket.logit_rows, unroll=True)
    report = compile_for_h200(
        functools.partial(step, graph, shape, sample),
        params,
        state,
        StepPlan.pack(bucket, REQUESTS),
        donate=1,
        options=product_options(num_rows),
    )
    return Compiled(report, state, config.vocab_size)


def compile_admission(config: ModelConfig, count: int) -> Compiled:
    """The engine's program for so many requests that enter."""
    state = _state(config, REQUESTS)
    new = AdmissionArrays.empty(state, count)
    return Compiled(
        compile_for_h200(admit, state, new, donate=0, options=product_options(0)),
        state,
        config.vocab_size,
    )


def _state(config: ModelConfig, num_rows: int) -> EngineState:
    """What the state looks like."""
    layout = model_graph(config).layout
    described: EngineState = jax.eval_shape(
        functools.partial(
            initial_state,
            layout,
            num_slots=REQUESTS,
            max_model_len=1024,
            num_modules=config.num_modules,
            num_drafts=config.num_drafts,
            lag=max(config.num_modules, 1),
            num_rows=num_rows,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            num_pages=(4000,) * len(layout.groups),
            page_size=16,
            dtype=DTYPE,
        )
    )
    return described


def of_one_layer(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """What a copy of one layer's pages looks like."""
    return jax.ShapeDtypeStruct(array.shape[1:], array.dtype)
