"""What a step must cost: the bytes it has to read and the operations it has to do.

The floor of a step is the longer of its bytes over the bandwidth of a large copy and its operations
over the rate of a large product, both measured on the device at hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mmtp_jax.models.model import ModelGraph, Params
from mmtp_jax.specs import AttentionSpec, LatentAttentionSpec, LayerSpec, MoESpec
from pallas_kernels.bench.timing import Rates


@dataclass(frozen=True)
class Part:
    """One request's part of a step: its rows, the positions up to its last one, and whether a token
    is drawn (and drafts are made)."""

    context: int
    rows: int
    samples: bool


@dataclass(frozen=True)
class Floor:
    """The bytes to read and operations to do in a step, and the milliseconds they take at least."""

    bytes: int
    flops: int
    milliseconds: float
    bound: Literal["bytes", "flops"]


def step_floor(graph: ModelGraph, params: Params, parts: tuple[Part, ...], rates: Rates) -> Floor:
    """The floor of a step of these requests."""
    size, work = step_bytes(graph, params, parts), step_flops(graph, parts)
    by_bytes = 1e3 * size / rates.bytes_per_second
    by_flops = 1e3 * work / rates.flops_per_second
    longer = max(by_bytes, by_flops)
    return Floor(size, work, longer, "bytes" if longer == by_bytes else "flops")


def step_bytes(graph: ModelGraph, params: Params, parts: tuple[Part, ...]) -> int:
    """Bytes that a step must read: every parameter once, the head once for the target's draws and
    once per draft, and the cache of each request's context (or window).

    Of the embedding only the rows of the step count; of routed experts the share that as many
    uniform choices touch; a repeated module counts once per draft.
    """
    config = graph.config
    rows = sum(part.rows for part in parts)
    total = 0.0
    for name, shape, itemsize in _parameters(graph, params):
        size = math.prod(shape) * itemsize
        if name == "embed.weight":
            total += rows * config.hidden_size * itemsize
            total += size * _head_uses(graph, parts) * config.tie_embeddings
        elif name == "head.kernel":
            total += size * _head_uses(graph, parts)
        else:
            total += size * _touched(_layer(graph, name), name, rows) * _uses(graph, name)
    itemsize = graph.dtype(params).itemsize
    for group in graph.layout.groups:
        uses = _repeats(graph) if group.owner == "modules" else 1
        positions = sum(_positions(part, group.window) for part in parts)
        total += positions * group.values_per_position() * itemsize * uses
    return round(total)


def step_flops(graph: ModelGraph, parts: tuple[Part, ...]) -> int:
    """Operations that a step must do in matrix products and attention: of the target for all rows,
    of every module for one row per module and request (all rows of a prompt's chunk)."""
    config = graph.config
    rows = sum(part.rows for part in parts)
    inside = tuple(
        Part(part.context, min(part.rows, config.num_modules), True) if part.samples else part
        for part in parts
    )
    module_rows = sum(part.rows for part in inside)
    drawn = sum(part.rows for part in parts if part.samples)
    drafting = sum(part.samples for part in parts)
    shared = config.mtp is not None and not config.mtp.own_head
    head_rows = drawn + drafting * config.num_drafts * shared
    total = 0.0
    for name, shape in graph.shapes().items():
        if len(shape) < 2:
            continue
        size = math.prod(shape)
        if name == "embed.weight":
            total += 2 * size * head_rows * config.tie_embeddings
        elif name == "head.kernel":
            total += 2 * size * head_rows
        elif name.endswith(".head.kernel"):
            total += 2 * size * drafting * _uses(graph, name)
        else:
            count = module_rows if name.startswith("mtp.") else rows
            share = _chosen(_layer(graph, name), name)
            total += 2 * size * share * count * _uses(graph, name)
    total += sum(_attention(spec, parts) for spec in config.layers)
    if config.mtp is not None:
        total += _repeats(graph) * sum(_attention(spec, inside) for spec in config.mtp.modules)
    return round(total)


def _parameters(graph: ModelGraph, params: Params) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Name, shape and bytes per number of everything a checkpoint has to provide."""
    shapes = graph.shapes()
    for leaf, value in zip(graph.leaves(), params, strict=True):
        for name in leaf.names:
            yield name, shapes[name], value.dtype.itemsize


def _layer(graph: ModelGraph, name: str) -> LayerSpec | None:
    """The spec of the layer or module that a parameter belongs to."""
    kind, _, rest = name.partition(".")
    if kind == "layers":
        return graph.config.layers[int(rest.split(".")[0])]
    if kind == "mtp" and rest.split(".")[0].isdecimal():
        assert graph.config.mtp is not None
        return graph.config.mtp.modules[int(rest.split(".")[0])]
    return None


def _chosen(spec: LayerSpec | None, name: str) -> float:
    """The share of a parameter that one row uses."""
    if spec is None or ".experts." not in name:
        return 1.0
    assert isinstance(spec.mlp, MoESpec)
    return spec.mlp.top_k / spec.mlp.num_experts


def _touched(spec: LayerSpec | None, name: str, rows: int) -> float:
    """The share of a parameter that `rows` rows use, all together."""
    chosen = _chosen(spec, name)
    return 1.0 - (1.0 - chosen) ** rows


def _repeats(graph: ModelGraph) -> int:
    return 1 if graph.config.mtp is None else graph.config.mtp.repeats


def _uses(graph: ModelGraph, name: str) -> int:
    """How often a step applies the parameter."""
    return _repeats(graph) if name.startswith("mtp.") else 1


def _head_uses(graph: ModelGraph, parts: tuple[Part, ...]) -> int:
    """How often a step applies the target's head."""
    if not any(part.samples for part in parts):
        return 0
    mtp = graph.config.mtp
    return 1 if mtp is None or mtp.own_head else 1 + mtp.num_drafts


def _positions(part: Part, window: int | None) -> int:
    """Cached positions that a request's rows read in a group."""
    return part.context if window is None else min(part.context, window - 1 + part.rows)


def _attention(spec: LayerSpec, parts: tuple[Part, ...]) -> int:
    attention: AttentionSpec | LatentAttentionSpec = spec.attention
    if isinstance(attention, AttentionSpec):
        width = attention.head_dim + attention.value_size
    else:
        width = 2 * attention.latent_rank + attention.rope.dim
    window = attention.window
    pairs = sum(
        part.context - row if window is None else min(part.context - row, window)
        for part in parts
        for row in range(part.rows)
    )
    return 2 * attention.num_heads * width * pairs
