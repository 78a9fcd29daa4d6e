"""Verification: accept the drafts that equal the target's own draws.

The token at index i is a function of (target logits at i-1, seed, i) alone (position-keyed Gumbel
coupling, arXiv 2408.07978), so the emitted text is the target's own whatever was drafted.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


class Verdict(NamedTuple):
    """`num_emitted` tokens are emitted; `stopped` says the last one is a stop token."""

    num_emitted: Int32[Array, " B"]
    stopped: Bool[Array, " B"]


def verify(
    draws: Int32[Array, "B W"],
    drafts: Int32[Array, "B W"],
    num_draws: Int32[Array, " B"],
    stop_ids: Int32[Array, "B S"],
) -> Verdict:
    """Emit the draws up to and including the first that differs from its draft or is a stop token.

    `draws[b, j]` is the target's token at index length + j, `drafts[b, j]` the draft for that
    index; the first `num_draws[b]` entries are meaningful (drafts + 1; 0: nothing is sampled).
    """
    column = jnp.arange(draws.shape[1])
    has_draft = column < num_draws[:, None] - 1
    stops = jnp.any(draws[:, :, None] == stop_ids[:, None, :], axis=2)
    stops &= column < num_draws[:, None]
    goes_on = has_draft & (draws == drafts) & ~stops
    accepted = jnp.sum(jnp.cumprod(goes_on, axis=1, dtype=jnp.int32), axis=1)
    num_emitted = jnp.where(num_draws > 0, accepted + 1, 0)
    stopped = jnp.take_along_axis(stops, jnp.minimum(accepted, draws.shape[1] - 1)[:, None], axis=1)
    return Verdict(num_emitted, stopped[:, 0] & (num_draws > 0))
