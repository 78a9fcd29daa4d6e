"""Multi-head latent attention in its absorbed form: the cache holds one latent per position.

The per-head key and value projections of the latent are folded into the query and into the output,
so attention is that of one key head with entries [latent | rotated key] whose values are the
latent (arXiv 2405.04434, section 2.1.2).
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmtp_jax.cache.pages import Pages
from mmtp_jax.models.parts import Linear, RMSNorm, parameter
from mmtp_jax.models.rotary import rotate
from mmtp_jax.models.sharding import by_heads
from mmtp_jax.models.visit import Visit
from mmtp_jax.specs import LatentAttentionSpec, ModelConfig
from pallas_kernels.ragged_paged_attention import ragged_paged_attention

# The norms inside have an epsilon of their own in every released implementation.
_EPS = 1e-6


class LatentAttention(nnx.Module):
    """Writes this pass's latents and rotated keys into the cache, then reads."""

    def __init__(self, spec: LatentAttentionSpec, config: ModelConfig) -> None:
        hidden, heads, rank = config.hidden_size, spec.num_heads, spec.latent_rank
        wide = heads * (spec.nope_dim + spec.rope.dim)
        if spec.query_rank is None:
            self.q = Linear(hidden, wide, ("hidden", "heads"))
        else:
            self.q_down = Linear(hidden, spec.query_rank, ("hidden", "rank"), bias=spec.bias)
            self.q_norm = RMSNorm(spec.query_rank, config, "rank", eps=_EPS)
            self.q_up = Linear(spec.query_rank, wide, ("rank", "heads"))
        self.kv_down = Linear(hidden, rank + spec.rope.dim, ("hidden", "rank"), bias=spec.bias)
        self.kv_norm = RMSNorm(rank, config, "rank", eps=_EPS)
        axes = ("rank", "heads")
        self.kv_up = parameter(
            (rank, heads * (spec.nope_dim + spec.value_dim)), axes, std=rank**-0.5
        )
        self.o = Linear(heads * spec.value_dim, hidden, ("heads", "hidden"), bias=spec.bias)
        self.spec = spec

    def __call__(
        self, x: Float[Array, "T H"], visit: Visit, pages: Pages
    ) -> tuple[Float[Array, "T H"], Pages]:
        spec, rows, rank = self.spec, visit.rows, self.spec.latent_rank
        q = self.q(x) if spec.query_rank is None else self.q_up(self.q_norm(self.q_down(x)))
        q = q.reshape(-1, spec.num_heads, spec.nope_dim + spec.rope.dim)
        down = self.kv_down(x)
        latent = self.kv_norm(down[:, :rank])
        key = rotate(down[:, None, rank:], rows.position, spec.rope)[:, 0]
        turned = rotate(q[..., spec.nope_dim :], rows.position, spec.rope)
        up = self.kv_up[...].reshape(rank, spec.num_heads, spec.nope_dim + spec.value_dim)
        absorbed = jnp.einsum("thn,rhn->thr", q[..., : spec.nope_dim], up[..., : spec.nope_dim])
        entry = jnp.concatenate([latent, key], axis=-1)[:, None]
        arrays, layer, pages = visit.store(pages, visit.place.attention, {"k": entry})
        group = visit.place.attention[0]

        def attend(q: Array, k_pages: Array, *rest: Array) -> Float[Array, "T Hq Dv"]:
            return ragged_paged_attention(
                q, k_pages, None, *rest, scale=spec.scale, window=spec.window, value_dim=rank
            )

        # All heads read the same latents.
        mixed = by_heads(attend, spec.num_heads, (1, None, None, None, None, None), 1)(
            jnp.concatenate([absorbed, turned], axis=-1),
            arrays["k"],
            jnp.int32(layer),
            rows.tables[group],
            rows.cu_q_lens,
            rows.kv_lens,
        )
        values = jnp.einsum("thr,rhv->thv", mixed, up[..., spec.nope_dim :])
        return self.o(values.reshape(x.shape[0], -1)), pages
