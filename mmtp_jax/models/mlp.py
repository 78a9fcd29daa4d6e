"""The gated MLP."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmtp_jax.models.parts import Linear, parameter
from mmtp_jax.specs import DenseSpec


def gated(
    gate: Float[Array, "... F"], up: Float[Array, "... F"], limit: float | None
) -> Float[Array, "... F"]:
    """silu(gate) * up (SwiGLU, arXiv 2002.05202), both clamped to `limit` if there is one."""
    activated = jax.nn.silu(gate)
    if limit is not None:
        activated, up = jnp.minimum(activated, limit), jnp.clip(up, -limit, limit)
    return activated * up


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)), times a learned scalar if the spec has one."""

    def __init__(self, spec: DenseSpec, hidden: int) -> None:
        self.gate = Linear(hidden, spec.size, ("hidden", "mlp"))
        self.up = Linear(hidden, spec.size, ("hidden", "mlp"))
        self.down = Linear(spec.size, hidden, ("mlp", "hidden"))
        self.scale = parameter((1,), ("one",), std=0.1, mean=1.0) if spec.global_scale else None
        self.limit = spec.limit

    def __call__(self, x: Float[Array, "T H"]) -> Float[Array, "T H"]:
        y = self.down(gated(self.gate(x), self.up(x), self.limit))
        return y if self.scale is None else y * self.scale[...].astype(y.dtype)
