"""Mixture of experts: a sigmoid router, and routed, shared and sink experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from mmtp_jax.models.mlp import GATE_UP, GatedMLP, gated
from mmtp_jax.models.parts import parameter
from mmtp_jax.models.sharding import TENSOR_AXIS, current_mesh
from mmtp_jax.specs import MoESpec
from pallas_kernels.grouped_matmul import grouped_matmul

# Keeps the division defined when every score underflows (DeepSeek-V3's reference code).
_TINY = 1e-20


class Router(nnx.Module):
    """Which experts a token takes, and with what weights. Scores are float32.

    Equal scores go to the lowest index.
    """

    def __init__(self, spec: MoESpec, hidden: int) -> None:
        rows = spec.num_experts + spec.num_sinks
        self.kernel = parameter((hidden, rows), ("hidden", "one"), std=hidden**-0.5, float32=True)
        self.bias = (
            parameter((spec.num_experts,), ("one",), std=0.1, float32=True)
            if spec.selection_bias
            else None
        )
        self.scale = parameter((1,), ("one",), std=0.1, mean=1.0) if spec.global_scale else None
        self.spec = spec

    def __call__(
        self, x: Float[Array, "T H"]
    ) -> tuple[Int32[Array, "T K"], Float[Array, "T K"], Float[Array, "T S"]]:
        """The chosen experts, their weights and those of the sinks."""
        spec = self.spec
        # A GPU would round the operands to tf32, and close scores would change places.
        logits = jnp.dot(x.astype(jnp.float32), self.kernel[...], precision="highest")
        scores = jax.nn.sigmoid(logits)
        routed, sinks = scores[:, : spec.num_experts], scores[:, spec.num_experts :]
        chosen = self._choose(routed)
        weights = jnp.take_along_axis(routed, chosen, axis=1)
        if spec.normalize:
            total = jnp.sum(weights, axis=1, keepdims=True) + jnp.sum(sinks, axis=1, keepdims=True)
            weights, sinks = weights / (total + _TINY), sinks / (total + _TINY)
        scale = jnp.float32(spec.scale)
        if self.scale is not None:
            scale *= self.scale[...].astype(jnp.float32)
        return chosen, weights * scale, sinks * scale

    def _choose(self, scores: Float[Array, "T E"]) -> Int32[Array, "T K"]:
        spec = self.spec
        if self.bias is not None:
            scores = scores + self.bias[...].astype(jnp.float32)
        if spec.num_groups > 1:
            grouped = scores.reshape(scores.shape[0], spec.num_groups, -1)
            best = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=2)
            groups = jax.lax.top_k(best, spec.top_groups)[1]
            kept = jnp.any(groups[:, :, None] == jnp.arange(spec.num_groups), axis=1)
            scores = jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(scores.shape)
        return jax.lax.top_k(scores, spec.top_k)[1].astype(jnp.int32)


class Experts(nnx.Module):
    """Gated MLPs of one size, stacked; `axis` names the stack."""

    def __init__(self, count: int, size: int, hidden: int, axis: str) -> None:
        inward, outward = (axis, "hidden", "one", "expert_mlp"), (axis, "expert_mlp", "hidden")
        self.gate_up = parameter((count, hidden, 2, size), inward, std=hidden**-0.5, joined=GATE_UP)
        self.down = parameter((count, size, hidden), outward, std=size**-0.5)

    def every(self, x: Float[Array, "T H"], weights: Float[Array, "T S"]) -> Float[Array, "T H"]:
        """Each row through all of them, weighted. One product per expert: a single one for all
        would copy the weights, whose expert axis comes first."""
        rows = jnp.broadcast_to(x, (weights.shape[1], *x.shape))
        gate_up = jnp.einsum("sth,shcf->stcf", rows, self.gate_up[...])
        hidden = gated(gate_up, None) * weights.T[:, :, None].astype(x.dtype)
        y = jnp.einsum("stf,sfh->sth", hidden, self.down[...], preferred_element_type=jnp.float32)
        return jnp.sum(y, axis=0).astype(x.dtype)


class MoE(nnx.Module):
    """The routed experts of each token, and what every token takes besides."""

    def __init__(self, spec: MoESpec, hidden: int) -> None:
        self.router = Router(spec, hidden)
        self.experts = Experts(spec.num_experts, spec.size, hidden, "experts")
        self.sinks = Experts(spec.num_sinks, spec.size, hidden, "sinks") if spec.num_sinks else None
        self.shared = None if spec.shared is None else GatedMLP(spec.shared, hidden)
        self.spec = spec

    def __call__(self, x: Float[Array, "T H"]) -> Float[Array, "T H"]:
        chosen, weights, sinks = self.router(x)
        experts = (self.experts.gate_up[...], self.experts.down[...])
        y = self._routed(x, chosen, weights, experts)
        if self.sinks is not None:
            y = y + self.sinks.every(x, sinks)
        return y if self.shared is None else y + self.shared(x)

    def _routed(
        self,
        x: Float[Array, "T H"],
        chosen: Int32[Array, "T K"],
        weights: Float[Array, "T K"],
        experts: tuple[Array, Array],
    ) -> Float[Array, "T H"]:
        """Over a mesh every device computes its own experts' part of each token (all of it where
        the devices cannot share the experts evenly)."""
        mesh = current_mesh()
        if mesh is None or self.spec.num_experts % mesh.size:
            return routed_experts(x, chosen, weights, experts, 0, self.spec.limit)
        local = self.spec.num_experts // mesh.size

        def part(x: Array, chosen: Array, weights: Array, experts: tuple[Array, Array]) -> Array:
            first = jax.lax.axis_index(TENSOR_AXIS) * local
            y = routed_experts(x, chosen, weights, experts, first, self.spec.limit)
            return jax.lax.psum(y, TENSOR_AXIS)

        everywhere, split = PartitionSpec(), PartitionSpec(TENSOR_AXIS)
        return jax.shard_map(
            part,
            mesh=mesh,
            in_specs=(everywhere, everywhere, everywhere, (split, split)),
            out_specs=everywhere,
            check_vma=False,
        )(x, chosen, weights, experts)


def routed_experts(
    x: Float[Array, "T H"],
    chosen: Int32[Array, "T K"],
    weights: Float[Array, "T K"],
    experts: tuple[Float[Array, "E H 2 F"], Float[Array, "E F H"]],
    first: int | Int32[Array, ""],
    limit: float | None,
) -> Float[Array, "T H"]:
    """The weighted sum over each row's chosen experts among `first` .. `first + E - 1`.

    Rows are sorted by expert for the grouped products. Each row adds up its experts in the order
    the router chose them, so that its bits do not depend on the other rows.
    """
    gate_up, down = experts
    count, top_k = gate_up.shape[0], chosen.shape[1]
    expert = chosen.reshape(-1) - first
    expert = jnp.where((expert >= 0) & (expert < count), expert, count)
    order = jnp.argsort(expert, stable=True)
    sizes = jnp.bincount(expert, length=count)
    rows = x[order // top_k]
    wide = grouped_matmul(rows, gate_up.reshape(*gate_up.shape[:2], -1), sizes)
    hidden = gated(wide.reshape(-1, *gate_up.shape[2:]), limit)
    y = grouped_matmul(hidden, down, sizes)
    y = y[jnp.argsort(order)].reshape(*chosen.shape, -1)
    return jnp.sum(y.astype(jnp.float32) * weights[:, :, None], axis=1).astype(x.dtype)
