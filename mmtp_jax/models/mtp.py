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
from jaxtyping import Array, Bool, Float, Int32

from mmtp_jax.cache.layout import Place
from mmtp_jax.cache.pages import Pages
from mmtp_jax.config import LayerSpec, ModelConfig, MTPConfig
from mmtp_jax.models.parts import DecoderLayer, Linear, RMSNorm
from mmtp_jax.models.rows import Rows


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
        self.norm = RMSNorm(hidden, config) if mtp.own_norm else None
        self.head = Linear(hidden, config.vocab_size, ("hidden", "vocab")) if mtp.own_head else None
        self.hidden_first = mtp.concat == "hidden_first"

    def __call__(
        self,
        embedded: Float[Array, "T H"],
        feed: Float[Array, "T H"],
        rows: Rows,
        write: Bool[Array, " T"],
        pages: Pages,
        place: Place,
        depth: int | Int32[Array, ""],
    ) -> tuple[Float[Array, "T H"], Float[Array, "T H"], Pages]:
        """The block's output before and after the module's own final norm, and the pages."""
        token, hidden = self.token_norm(embedded), self.hidden_norm(feed)
        pair = (hidden, token) if self.hidden_first else (token, hidden)
        x, pages = self.layer(
            self.fuse(jnp.concatenate(pair, axis=-1)), rows, write, pages, place, depth
        )
        return x, x if self.norm is None else self.norm(x), pages


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
    run.
    """

    def __init__(self, config: ModelConfig) -> None:
        mtp = config.mtp
        assert mtp is not None

        def stacked(first: int, count: int) -> MTPModule:
            graph, params = nnx.split(MTPModule(mtp.modules[first], config))
            stack = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), params)
            return nnx.merge(graph, stack)

        self.runs = nnx.List([stacked(first, count) for first, count in runs(mtp)])
