"""MTP modules: one decoder layer per speculative token, parameters stacked over depth.

Module m at position q fuses norm(feed) and norm(embedding of token q+1+m), runs one block over its
own cache, and its output at the newest position predicts token q+2+m. Depths whose layers have the
same spec form a run: stacked parameters, one `lax.scan` (MiMo: 1 run, Inkling: 5).
"""

from __future__ import annotations

from itertools import groupby

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmtp_jax.cache.pages import Pages
from mmtp_jax.models.layer import DecoderLayer
from mmtp_jax.models.parts import Linear, RMSNorm
from mmtp_jax.models.visit import Visit
from mmtp_jax.specs import LayerSpec, ModelConfig, MTPConfig


class MTPModule(nnx.Module):
    """One module (layouts: DeepSeek-V3 report section 2.2; MiMo-7B model card)."""

    def __init__(self, spec: LayerSpec, config: ModelConfig) -> None:
        hidden = config.hidden_size
        mtp = config.mtp
        assert mtp is not None
        self.token_norm = RMSNorm(hidden, config)
        self.hidden_norm = RMSNorm(hidden, config)
        self.fuse = Linear(2 * hidden, hidden, ("fused", "hidden"))
        self.layer = DecoderLayer(spec, config)
        self.norm = RMSNorm(hidden, config) if mtp.norm == "own" else None
        self.head = (
            Linear(hidden, config.embedding_size, ("hidden", "vocab")) if mtp.own_head else None
        )
        self.hidden_first = mtp.concat == "hidden_first"

    def __call__(
        self,
        embedded: Float[Array, "T H"],
        feed: Float[Array, "T H"],
        visit: Visit,
        pages: Pages,
    ) -> tuple[Float[Array, "T H"], Pages]:
        """The block's output before any norm, and the pages."""
        token, hidden = self.token_norm(embedded), self.hidden_norm(feed)
        pair = (hidden, token) if self.hidden_first else (token, hidden)
        return self.layer(self.fuse(jnp.concatenate(pair, axis=-1)), visit, pages)


def runs(mtp: MTPConfig) -> list[tuple[int, int]]:
    """Maximal runs (first module, count) of consecutive modules with equal layer specs."""
    found, first = [], 0
    for _, members in groupby(mtp.modules):
        count = len(list(members))
        found.append((first, count))
        first += count
    return found


class MTPStack(nnx.Module):
    """The modules of a checkpoint: one stacked `MTPModule` per run, leading axis = depth in the
    run, and the norm that all may share.
    """

    def __init__(self, config: ModelConfig) -> None:
        mtp = config.mtp
        assert mtp is not None

        def stacked(first: int, count: int) -> MTPModule:
            graph, params = nnx.split(MTPModule(mtp.modules[first], config))
            stack = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), params)
            return nnx.merge(graph, stack)

        self.runs = nnx.List([stacked(first, count) for first, count in runs(mtp)])
        self.norm = RMSNorm(config.hidden_size, config) if mtp.norm == "shared" else None
