"""Every row's logits of a step, for scoring."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from mmtp_jax.engine.plan import CollectedLogits
from mmtp_jax.models.model import Model
from mmtp_jax.models.rows import Rows
from mmtp_jax.speculative.module import Proposal


def all_logits(
    model: Model,
    normed: Float[Array, "T H"],
    rows: Rows,
    window: Rows | None,
    proposal: Proposal | None,
) -> CollectedLogits:
    """Logits of the target rows, and of every module at the window rows (none without modules)."""
    logits = model.target.logits(normed)
    mtp_rows, mtp_logits = rows, jnp.zeros((0, *logits.shape), jnp.float32)
    if window is not None and proposal is not None and proposal.logits is not None:
        mtp_rows, mtp_logits = window, proposal.logits
    return CollectedLogits(
        target_request=rows.request,
        target_position=rows.position,
        target_real=rows.real,
        target_logits=logits,
        mtp_request=mtp_rows.request,
        mtp_position=mtp_rows.position,
        mtp_real=mtp_rows.real,
        mtp_logits=mtp_logits,
    )
