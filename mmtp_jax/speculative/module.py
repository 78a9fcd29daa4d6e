"""One module over some rows: what both propose routines are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from mmtp_jax.cache.pages import Pages
from mmtp_jax.models.model import Model
from mmtp_jax.models.mtp import MTPModule
from mmtp_jax.models.rows import Rows
from mmtp_jax.models.visit import Visit
from mmtp_jax.specs import MTPConfig

# (logits [B, V], slot [B] (R: nothing is wanted), index of the token to choose [B], token history
# [R, L]) -> token [B]
Choose = Callable[[Array, Array, Array, Array], Array]


@dataclass(frozen=True)
class Window:
    """What the modules are run over: the rows that some module does not hold yet, of B requests.

    The first `modules[b]` of them run for request b; what others compute of its rows is dropped.
    `feed` holds the target's hidden state of every row, `length` the committed tokens: draft m+1 is
    for index length + m, and is written to the history if it is one of the first `drafts[b]`.
    `exact` counts the leading positions at which each module's entries are final, `capacity` the
    positions that have pages.
    """

    rows: Rows
    feed: Float[Array, "T H"]
    slot: Int32[Array, " B"]
    exact: Int32[Array, "B N"]
    length: Int32[Array, " B"]
    modules: Int32[Array, " B"]
    drafts: Int32[Array, " B"]
    capacity: Int32[Array, " B"]


class Proposal(NamedTuple):
    """Drafts per request, the history with the drafts appended, the pages, the last module's output
    at each request's newest row, and (scoring) all logits. Drafts beyond what was asked for mean
    nothing.
    """

    drafts: Int32[Array, "B D"]
    tokens: Int32[Array, "R L"]
    pages: Pages
    output: Float[Array, "B H"]
    logits: Float[Array, "N T V"] | None


def run_module(
    mtp: MTPConfig,
    model: Model,
    module: MTPModule,
    consumed: Int32[Array, " T"],
    feed: Float[Array, "T H"],
    visit: Visit,
    pages: Pages,
) -> tuple[Float[Array, "T H"], Float[Array, "T H"], Pages]:
    """The output to feed on, the output for the head, and the pages with this pass's entries."""
    assert model.mtp is not None
    embedded = model.target.embedded(consumed, norm=mtp.embed_norm)
    if mtp.zero_first_embedding:
        embedded = jnp.where((visit.rows.position == 0)[:, None], 0, embedded)
    raw, pages = module(embedded, feed, visit, pages)
    norm = model.mtp.norm if module.norm is None else module.norm
    normed = raw if norm is None else norm(raw)
    return raw if mtp.feed == "chain_pre" else normed, normed, pages


def module_logits(
    model: Model, module: MTPModule, normed: Float[Array, "S H"]
) -> Float[Array, "S V"]:
    """Float32 logits of a module's normed outputs."""
    if module.head is None:
        return model.target.logits(normed)
    return module.head(normed).astype(jnp.float32)[:, : model.target.vocab_size]
