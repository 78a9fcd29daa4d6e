"""The smallest parts of every family: parameters, norms, projections.

Flax nnx modules hold the parameters; they are split once at load, and the engine's step works on
the pure pytree. Every parameter names its logical axes (`axes=`) for sharding over a mesh.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmtp_jax.specs import ModelConfig


@dataclass(frozen=True)
class Joined:
    """How a parameter [..., N, M] consists of several outside (checkpoints know no others).

    They lie in the order of `parts` (name, size) along `axis` (-1 or -2), and outside the last two
    axes of each are one: [..., N * size] or [..., size * M]. A name takes the place of as many
    components at the end of the parameter's own path as it has.
    """

    axis: int
    parts: tuple[tuple[str, int], ...]

    def of(self, variable: str) -> Joined:
        """The parts' variable of that name."""
        parts = tuple((f"{name}.{variable}", size) for name, size in self.parts)
        return replace(self, parts=parts)


def parameter(
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    *,
    std: float,
    mean: float = 0.0,
    float32: bool = False,
    joined: Joined | None = None,
) -> nnx.Param[Array]:
    """A parameter's declaration. Modules are only ever built abstractly (shapes, logical axes
    and the distribution of a random initialisation); values come from a checkpoint or
    `random_value`. `float32` parameters keep that precision whatever the model's dtype; `joined`
    ones have several names outside.
    """
    zeros = jnp.zeros(shape, jnp.float32)
    return nnx.Param(zeros, axes=axes, std=std, mean=mean, float32=float32, joined=joined)


class RMSNorm(nnx.Module):
    """x / rms(x) in float32, cast back, times the scale ("one_plus": times 1 + scale, in float32:
    a bfloat16 near 1 has not the digits of one near 0)."""

    def __init__(
        self, size: int, config: ModelConfig, axis: str = "hidden", *, eps: float | None = None
    ) -> None:
        plain = config.norm_style == "plain"
        self.scale = parameter((size,), (axis,), mean=float(plain), std=0.1)
        self.eps = config.norm_eps if eps is None else eps
        self.one_plus = not plain

    def __call__(self, x: Float[Array, "... H"]) -> Float[Array, "... H"]:
        wide = x.astype(jnp.float32)
        wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...]
        if self.one_plus:
            return (wide * (1 + scale.astype(jnp.float32))).astype(x.dtype)
        return wide.astype(x.dtype) * scale.astype(x.dtype)


class Linear(nnx.Module):
    """x @ kernel [+ bias]; kernels are [in, out]."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        axes: tuple[str, str],
        *,
        bias: bool = False,
    ) -> None:
        self.kernel = parameter((inputs, outputs), axes, std=inputs**-0.5)
        self.bias = parameter((outputs,), axes[1:], std=0.1) if bias else None

    def __call__(self, x: Float[Array, "T I"]) -> Float[Array, "T O"]:
        y = x @ self.kernel[...]
        return y if self.bias is None else y + self.bias[...]


class FusedLinear(nnx.Module):
    """Several projections of the same rows as one product: a decoding step on a GPU is bound by the
    number of its kernels. The outputs [T, N, M] consist of theirs as `joined` says."""

    def __init__(
        self,
        inputs: int,
        outputs: tuple[int, int],
        axes: tuple[str, str],
        joined: Joined,
        *,
        bias: bool = False,
    ) -> None:
        self.kernel = parameter(
            (inputs, *outputs), ("hidden", *axes), std=inputs**-0.5, joined=joined.of("kernel")
        )
        self.bias = parameter(outputs, axes, std=0.1, joined=joined.of("bias")) if bias else None

    def __call__(self, x: Float[Array, "T I"]) -> Float[Array, "T N M"]:
        # Two output axes, not one reshaped: either may be split over devices.
        y = jnp.einsum("ti,inm->tnm", x, self.kernel[...])
        return y if self.bias is None else y + self.bias[...]
