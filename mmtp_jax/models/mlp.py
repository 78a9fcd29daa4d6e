"""The gated MLP."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmtp_jax.models.parts import FusedLinear, Joined, Linear, parameter
from mmtp_jax.specs import DenseSpec

# [..., 2, F]: the gate first.
GATE_UP = Joined(-2, (("gate", 1), ("up", 1)))


def gated(gate_up: Float[Array, "... 2 F"], limit: float | None) -> Float[Array, "... F"]:
    """silu(gate) * up (SwiGLU, arXiv 2002.05202), both clamped to `limit` if there is one."""
    activated, up = jax.nn.silu(gate_up[..., 0, :]), gate_up[..., 1, :]
    if limit is not None:
        activated, up = jnp.minimum(activated, limit), jnp.clip(up, -limit, limit)
    return activated * up


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)), times a learned scalar if the spec has one."""

    def __init__(self, spec: DenseSpec, hidden: int) -> None:
        self.gate_up = FusedLinear(hidden, (2, spec.size), ("one", "mlp"), GATE_UP)
        self.down = Linear(spec.size, hidden, ("mlp", "hidden"))
        self.scale = parameter((1,), ("one",), std=0.1, mean=1.0) if spec.global_scale else None
        self.limit = spec.limit

    def __call__(self, x: Float[Array, "T H"]) -> Float[Array, "T H"]:
        y = self.down(gated(self.gate_up(x), self.limit))
        return y if self.scale is None else y * self.scale[...].astype(y.dtype)
