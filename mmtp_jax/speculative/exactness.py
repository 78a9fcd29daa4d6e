"""When a module's cache entry is final.

Module m's entry at position q is a function of the tokens up to q+1+m. Entries computed while the
tokens beyond were drafts are final only if those drafts were accepted.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int32


def advance_exact(
    exact: Int32[Array, "B N"],
    computed: Int32[Array, " B"],
    length: Int32[Array, " B"],
    accepted: Int32[Array, " B"],
    ran: Int32[Array, " B"],
) -> Int32[Array, "B N"]:
    """Exact counts after a verification.

    `computed` and `length` are the values before this verification, when the first `ran` modules
    ran, and `accepted` the drafts it confirmed (0 for prompt chunks). Of a module that did not run
    it says nothing. Counts never fall: after a prefix hit the formula alone would dip below the
    reused length and rewrite shared pages.
    """
    depth = jnp.arange(exact.shape[1])
    confirmed = (length + accepted - 1)[:, None] - depth
    advanced = jnp.maximum(exact, jnp.minimum(computed[:, None], confirmed))
    return jnp.where(depth < ran[:, None], advanced, exact)
