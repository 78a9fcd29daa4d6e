"""What a model is, as text: layers, parameters, modules, and what its cache takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from rich.filesize import decimal

from mmtp_jax.cache.pages import bytes_per_page
from mmtp_jax.cache.pool import CacheGroup
from mmtp_jax.config import EngineConfig
from mmtp_jax.engine.sizes import behind_of
from mmtp_jax.families.registry import FAMILIES
from mmtp_jax.models.model import ModelGraph
from mmtp_jax.specs import (
    AttentionSpec,
    DenseSpec,
    LatentAttentionSpec,
    LayerSpec,
    MoESpec,
    RopeConfig,
)


def describe_model(graph: ModelGraph) -> Iterator[str]:
    """Family, shapes, parameters and modules, line by line."""
    model = graph.config
    tied = "tied" if model.tie_embeddings else "separate"
    yield f"family        {model.family}"
    yield (
        f"shapes        hidden {model.hidden_size}, vocabulary {model.vocab_size}"
        f" ({model.embedding_size} rows, {tied} head), context {model.max_position}"
    )
    for label, layers in (("layers", model.layers), ("modules", _modules(graph))):
        for text in _kinds(layers):
            yield f"{label:<13} {text}"
            label = ""
    yield from _parameters(graph)
    mtp = model.mtp
    if mtp is None:
        yield "MTP           no modules: nothing to speculate with"
        return
    yield (
        f"MTP           {mtp.num_modules} module(s), {mtp.concat}, target hidden state"
        f" {mtp.target_hidden}-norm, feed {mtp.feed}, norm {mtp.norm},"
        f" {'own heads' if mtp.own_head else 'shared head'}"
    )


def describe_cache(
    graph: ModelGraph, config: EngineConfig, dtype: np.dtype, context: int
) -> Iterator[str]:
    """Bytes per position of every cache group, and what one request of `context` positions takes,
    line by line."""
    total, page_size = 0, config.cache.page_size
    behind = behind_of(config.speculative, graph.config.num_modules)
    most_rows = config.limits.max_num_batched_tokens
    for group in graph.layout.groups:
        pages = CacheGroup(
            group.name, group.owner, group.window, 0, page_size
        ).pages_for_one_request(behind, context, most_rows)
        total += bytes_per_page(group, page_size, dtype) * pages
        window = "all positions" if group.window is None else f"window {group.window}"
        streams = " ".join(name for name, _ in group.streams)
        each = bytes_per_page(group, 1, dtype)
        yield (
            f"cache         {group.owner}, {group.num_layers} layer(s), {streams}, {window}:"
            f" {each} bytes per token"
        )
    yield (
        f"memory        {decimal(total)} of cache for one request of {context} tokens in chunks of"
        f" {most_rows}"
    )


def count_parameters(graph: ModelGraph) -> tuple[int, int]:
    """Parameters of the target and of the modules."""
    leaves = graph.leaves()
    modules = sum(leaf.num_values for leaf in leaves if leaf.names[0].startswith("mtp."))
    return sum(leaf.num_values for leaf in leaves) - modules, modules


def _parameters(graph: ModelGraph) -> Iterator[str]:
    target, modules = count_parameters(graph)
    yield f"parameters    {target:,} in the target, {modules:,} in the modules"
    model = graph.config
    published = FAMILIES[model.family].published.get(len(model.layers))
    if published is not None:
        difference = (published - target - modules) / 1e9
        yield (
            f"published     {published / 1e9:.0f} B: {difference:+.1f} B that are not here"
            " (towers and what the published count includes besides)"
        )


def _modules(graph: ModelGraph) -> tuple[LayerSpec, ...]:
    return () if graph.config.mtp is None else graph.config.mtp.modules


def _kinds(layers: Iterable[LayerSpec]) -> Iterator[str]:
    """One line per kind of layer, with the numbers of the layers."""
    members: dict[LayerSpec, list[int]] = {}
    for index, spec in enumerate(layers):
        members.setdefault(spec, []).append(index)
    for spec, indices in members.items():
        parts = [_attention(spec.attention), _mlp(spec.mlp)]
        if spec.conv_taps:
            parts.append(f"convolutions of {spec.conv_taps}")
        yield f"{_ranges(indices)}: {', '.join(parts)}"


def _ranges(indices: list[int]) -> str:
    """0, 1, 2, 5 as "0-2,5"."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _attention(spec: AttentionSpec | LatentAttentionSpec) -> str:
    if isinstance(spec, LatentAttentionSpec):
        return (
            f"latent attention, {spec.num_heads} heads of {spec.nope_dim}+{spec.rope.dim},"
            f" latent {spec.latent_rank}, {_rope(spec.rope)}"
        )
    window = "global" if spec.window is None else f"sliding {spec.window}"
    dims = f"{spec.head_dim}"
    if spec.value_size != spec.head_dim:
        dims += f"/{spec.value_size}"
    options = {
        "q and k norms": spec.qk_norm,
        "sinks": spec.sinks,
        "head gates": spec.head_gate,
        "relative bias": spec.relative is not None,
        "log scaling": spec.log_scaling is not None,
    }
    more = [name for name, there in options.items() if there]
    if spec.rope is not None:
        more.insert(0, _rope(spec.rope))
    heads = f"{window}, {spec.num_heads}/{spec.num_kv_heads} heads of {dims}"
    return ", ".join([heads, *more])


def _rope(rope: RopeConfig) -> str:
    scaling = f" {rope.scaling} x{rope.factor:g}" if rope.scaling else ""
    return f"rope {rope.dim} at {rope.theta:g}{scaling}"


def _mlp(spec: DenseSpec | MoESpec) -> str:
    if isinstance(spec, DenseSpec):
        return f"MLP {spec.size}"
    text = f"{spec.num_experts} experts of {spec.size}, {spec.top_k} taken"
    if spec.num_sinks:
        text += f", {spec.num_sinks} sinks"
    return text if spec.shared is None else f"{text}, shared {spec.shared.size}"
