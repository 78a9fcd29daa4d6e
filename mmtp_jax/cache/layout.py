"""Which cache group each layer's per-position values live in.

A group is (owner, window, shapes of its streams): layers that agree in all three share one stacked
array `[layers, pages, page, ...]`, one page table and one host allocator. Attention layers have
streams "k" and "v" (latent attention only "k", whose first entries are the values); the short
convolutions of a layer have streams "k", "v", "attention" and "mlp" of their raw inputs, kept by
position so that rejected drafts need no snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmtp_jax.specs import AttentionSpec, LayerSpec, ModelConfig


@dataclass(frozen=True)
class GroupSpec:
    """One cache group; `window` counts the newest position itself (None: all positions are
    kept).
    """

    owner: Literal["target", "modules"]
    window: int | None
    streams: tuple[tuple[str, tuple[int, ...]], ...]
    num_layers: int = 0

    @property
    def name(self) -> str:
        kind = "+".join(f"{name}{list(shape)}" for name, shape in self.streams)
        return f"{self.owner} {kind} window={self.window}"

    def values_per_position(self) -> int:
        """Scalars stored per position, all layers of the group together."""
        total = 0
        for _, shape in self.streams:
            size = 1
            for dim in shape:
                size *= dim
            total += size
        return total * self.num_layers


@dataclass(frozen=True)
class Place:
    """Where one layer's streams live: group index and layer index within the group."""

    attention: tuple[int, int]
    conv: tuple[int, int] | None

    def relative(self) -> tuple[Place, int]:
        """A place that equal layers share where their indices differ by the same number, and that
        number: it is added to every layer index."""
        (group, layer), conv = self.attention, self.conv
        if conv is not None:
            conv = conv[0], conv[1] - layer
        return Place((group, 0), conv), layer


@dataclass(frozen=True)
class CacheLayout:
    """All groups of a model, and the place of every target layer and module."""

    groups: tuple[GroupSpec, ...]
    target: tuple[Place, ...]
    modules: tuple[Place, ...]


def _attention_streams(spec: LayerSpec) -> tuple[tuple[str, tuple[int, ...]], ...]:
    attention = spec.attention
    if isinstance(attention, AttentionSpec):
        heads = attention.num_kv_heads
        return (("k", (heads, attention.head_dim)), ("v", (heads, attention.value_size)))
    return (("k", (1, attention.latent_rank + attention.rope.dim)),)


def _conv_streams(spec: LayerSpec, hidden: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    attention = spec.attention
    assert isinstance(attention, AttentionSpec)
    heads = attention.num_kv_heads
    return (
        ("k", (heads * attention.head_dim,)),
        ("v", (heads * attention.value_size,)),
        ("attention", (hidden,)),
        ("mlp", (hidden,)),
    )


def cache_layout(config: ModelConfig) -> CacheLayout:
    """Assign every layer of the target and of the modules to a group."""
    counts: dict[GroupSpec, int] = {}

    def take(group: GroupSpec) -> tuple[int, int]:
        layer = counts.get(group, 0)
        counts[group] = layer + 1
        return list(counts).index(group), layer

    def place(spec: LayerSpec, owner: Literal["target", "modules"]) -> Place:
        attention = take(GroupSpec(owner, spec.attention.window, _attention_streams(spec)))
        if not spec.conv_taps:
            return Place(attention, None)
        streams = _conv_streams(spec, config.hidden_size)
        return Place(attention, take(GroupSpec(owner, spec.conv_taps, streams)))

    target = tuple(place(spec, "target") for spec in config.layers)
    specs = () if config.mtp is None else config.mtp.modules
    modules = tuple(place(spec, "modules") for spec in specs)
    groups = tuple(
        GroupSpec(group.owner, group.window, group.streams, count)
        for group, count in counts.items()
    )
    return CacheLayout(groups, target, modules)
