"""The tokens that a step samples from the target."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from mmtp_jax.models.transformer import Transformer
from mmtp_jax.sampling.sampler import sample
from mmtp_jax.sampling.state import SamplingState

# Logits that exist at once: 256 MiB of float32. A multiple of 64 rows keeps their bits (see
# `EngineConfig.row_multiple`).
LOGITS_AT_ONCE = 1 << 26
_ROWS = 64


def draw(
    target: Transformer,
    normed: Float[Array, "S H"],
    state: SamplingState,
    slot: Int32[Array, " S"],
    index: Int32[Array, " S"],
    history: Int32[Array, "R L"],
) -> Int32[Array, " S"]:
    """The target's token at `index` of each row's sequence, from its final hidden state; in chunks
    of rows where all logits would be large."""
    chunk = max(LOGITS_AT_ONCE // target.vocab_size // _ROWS, 1) * _ROWS
    drawn = []
    for first in range(0, normed.shape[0], chunk):
        rows = slice(first, first + chunk)
        logits = target.logits(normed[rows])
        with jax.named_scope("sample"):
            drawn.append(sample(logits, state, slot[rows], index[rows], history))
    return jnp.concatenate(drawn)
