"""Training: the loop over batches, from new or given modules to trained ones.

The recipe follows FastMTP (arXiv 2509.18362): the target's own answers, a frozen target, weights
by depth (there fixed, here by how often a depth is reached).
"""

from __future__ import annotations

import dataclasses
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmtp_jax.checks import require
from mmtp_jax.models.model import ModelGraph, Params
from mmtp_jax.modules.checkpoint import save_modules
from mmtp_jax.specs import ModelConfig
from mmtp_jax.train.batches import Batches, Shape
from mmtp_jax.train.drafts import Drafts
from mmtp_jax.train.held_out import Split, progress
from mmtp_jax.train.loss import Sums
from mmtp_jax.train.optimizer import optimizer_for
from mmtp_jax.train.options import BatchOptions, FitOptions, Objective
from mmtp_jax.train.saves import Saves
from mmtp_jax.train.shards import Dataset
from mmtp_jax.train.step import DATA_AXIS, Batch, TrainState, divide, train_step, unite

Say = Callable[[str], None]


def fit(
    graph: ModelGraph,
    params: Params,
    data: Dataset,
    parts: Split,
    folder: Path,
    options: FitOptions,
    batch_options: BatchOptions,
    objective: Objective,
    facts: dict[str, Any],
    say: Say,
) -> Path:
    """Train the modules in `params` on every device there is; the folder of the trained ones.

    A training that was interrupted goes on from its last saved state. `facts` are kept with the
    modules and compared when a training goes on. Raises what `Saves` raises.
    """
    mtp = graph.config.mtp
    assert mtp is not None
    require(not mtp.own_head, "modules with heads of their own cannot be trained")
    mesh = Mesh(np.array(jax.devices()), (DATA_AXIS,))
    batches = Batches(data, parts.trained, batch_options, mesh.size)
    total = options.steps or sum(len(batches.epoch(epoch)) for epoch in range(options.epochs))
    settings = {
        **facts,
        **dataclasses.asdict(options),
        **dataclasses.asdict(batch_options),
        **dataclasses.asdict(objective),
        "steps": total,
        "devices": mesh.size,
        "data": zlib.crc32(data.lengths.tobytes() + data.prompt_lengths.tobytes()),
    }
    saves = Saves(folder, settings)
    optimizer = optimizer_for(graph, options, total)
    everywhere = NamedSharding(mesh, PartitionSpec())
    frozen, masters = jax.device_put(divide(graph, params), everywhere)
    state = TrainState(jnp.int32(0), masters, optimizer.init(masters))
    state = saves.latest(jax.device_put(state, everywhere))
    drafts = Drafts(graph)
    first = int(state.step)
    say(
        f"{len(parts.trained)} samples to train on, {len(parts.held_out)} held out;"
        f" {total} steps on {mesh.size} device(s), from step {first}"
    )
    placed = NamedSharding(mesh, PartitionSpec(DATA_AXIS))
    step = train_step(graph, objective, optimizer, mesh)
    programs = _compiled(step, frozen, state, batches, placed) if first < total else {}

    def look() -> dict[str, Any]:
        """How held-out samples are drafted now."""
        if not len(parts.held_out):
            return {}
        found = progress(drafts, unite(graph, frozen, state.masters), data, parts.held_out)
        rates = " ".join(f"{rate:.3f}" for rate in found.acceptance)
        say(f"held out: {found.tokens_per_step:.3f} tokens per step, accepted {rates}")
        return {"held_out": dataclasses.asdict(found)}

    sums: list[Sums] = []
    begin = time.perf_counter()
    for number, shape, batch in _from(batches, first, total):
        state, found = programs[shape](frozen, state, jax.device_put(batch, placed))
        sums.append(found)
        done = number + 1
        if done % options.log_every == 0 or done == total:
            entry = _entry(done, sums)
            seconds, begin = time.perf_counter() - begin, time.perf_counter()
            say(_line(entry, total, batch.tokens.size * len(sums) / seconds))
            sums = []
            if done % options.eval_every == 0 or done == total:
                entry |= look()
            saves.log(entry)
        if done % options.save_every == 0 or done == total:
            saves.save(state)
    saves.close()
    trained = folder / "modules"
    if not trained.exists():
        save_modules(
            trained,
            graph,
            unite(graph, frozen, state.masters),
            storage="bfloat16",
            num_speculative_tokens=mtp.num_modules,
            facts=settings,
        )
    return trained


def check_data(config: ModelConfig, data: Dataset) -> None:
    """`ConfigError` unless the model can have written the samples."""
    require(
        data.vocab_size == config.vocab_size,
        f"vocab_size of the data must be the model's {config.vocab_size}, got {data.vocab_size}",
    )
    longest = int(data.lengths.max())
    require(
        longest <= config.max_position,
        f"samples must have at most the model's {config.max_position} tokens, got {longest}",
    )


def _compiled(
    step: Any, frozen: Params, state: TrainState, batches: Batches, placed: NamedSharding
) -> dict[Shape, Any]:
    """The step for every shape of a batch, compiled side by side."""

    def compiled(shape: Shape) -> Any:
        batch = batches.load(shape, [[]] * batches.devices)
        described = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=placed), batch
        )
        return step.lower(frozen, state, described).compile()

    with ThreadPoolExecutor(len(batches.shapes)) as pool:
        return dict(zip(batches.shapes, pool.map(compiled, batches.shapes), strict=True))


def _from(batches: Batches, first: int, total: int) -> Iterator[tuple[int, Shape, Batch]]:
    """The batches of the steps from `first` on, with their numbers and shapes."""
    number = epoch = 0
    while number < total:
        for shape, parts in batches.epoch(epoch):
            if first <= number < total:
                yield number, shape, batches.load(shape, parts)
            number += 1
        epoch += 1


def _entry(step: int, sums: list[Sums]) -> dict[str, Any]:
    """Means over all tokens of some steps, by module."""
    whole = jax.tree.map(lambda *values: np.sum(np.stack(values), axis=0), *jax.device_get(sums))
    count = np.maximum(whole.tokens, 1)
    means = {
        name: (value / count).tolist()
        for name, value in whole._asdict().items()
        if name != "tokens"
    }
    return {"step": step, "tokens": float(whole.tokens[0]), **means}


def _line(entry: dict[str, Any], total: int, speed: float) -> str:
    def listed(name: str) -> str:
        return " ".join(f"{value:.3f}" for value in entry[name])

    return (
        f"step {entry['step']}/{total}: loss {listed('loss')}, agreement {listed('agreement')},"
        f" {speed:,.0f} tokens/s"
    )
