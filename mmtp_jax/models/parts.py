"""Shared parts of every family: norms, projections, rotary embedding, attention, MLP, short
convolution.

Flax nnx modules hold the parameters; they are split once at load, and the engine's step works on
the pure pytree. Every parameter names its logical axes (`axes=`) for sharding over a mesh.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Int32

from mmtp_jax.cache.layout import Place
from mmtp_jax.cache.pages import Pages, write_rows
from mmtp_jax.config import LayerSpec, ModelConfig, RopeConfig
from mmtp_jax.models.rows import Rows
from pallas_kernels.ragged_paged_attention import ragged_paged_attention


def parameter(
    shape: tuple[int, ...], axes: tuple[str, ...], *, std: float, mean: float = 0.0
) -> nnx.Param[Array]:
    """A parameter's declaration. Modules are only ever built abstractly (shapes, logical axes
    and the distribution of a random initialisation); values come from a checkpoint or
    `random_params`.
    """
    return nnx.Param(jnp.zeros(shape, jnp.float32), axes=axes, std=std, mean=mean)


class RMSNorm(nnx.Module):
    """x / rms(x) in float32, cast back, times the scale ("one_plus": times 1 + scale)."""

    def __init__(self, size: int, config: ModelConfig) -> None:
        self.scale = parameter(
            (size,), ("hidden",), mean=float(config.norm_style == "plain"), std=0.1
        )
        self.eps = config.norm_eps
        self.one_plus = config.norm_style == "one_plus"

    def __call__(self, x: Float[Array, "... H"]) -> Float[Array, "... H"]:
        wide = x.astype(jnp.float32)
        wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...]
        return wide.astype(x.dtype) * (1 + scale if self.one_plus else scale).astype(x.dtype)


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


def rotary_frequencies(rope: RopeConfig) -> Float[Array, " half"]:
    """Angular frequency of each rotated pair, float32 (llama3 scaling: Llama 3.1 reference
    code).
    """
    exponent = jnp.arange(0, rope.dim, 2, dtype=jnp.float32) / rope.dim
    frequency = 1.0 / rope.theta**exponent
    if rope.scaling is None:
        return frequency
    wavelength = 2 * math.pi / frequency
    low = rope.original_max_position / rope.low_freq_factor
    high = rope.original_max_position / rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    mixed = (1 - smooth) * frequency / rope.factor + smooth * frequency
    scaled = jnp.where(wavelength > low, frequency / rope.factor, mixed)
    return jnp.where(wavelength < high, frequency, scaled)


def rotate(
    x: Float[Array, "T H D"], position: Int[Array, " T"], rope: RopeConfig
) -> Float[Array, "T H D"]:
    """Rotary embedding of the first `rope.dim` entries, pairs (i, i + dim/2), float32 inside."""
    angle = position.astype(jnp.float32)[:, None] * rotary_frequencies(rope)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    half = rope.dim // 2
    first, second = (part.astype(jnp.float32) for part in (x[..., :half], x[..., half : rope.dim]))
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., rope.dim :]], axis=-1)


class Attention(nnx.Module):
    """Grouped-query attention over the paged cache: writes this pass's keys and values, then
    reads.
    """

    def __init__(self, spec: LayerSpec, config: ModelConfig) -> None:
        hidden, head = config.hidden_size, spec.head_dim
        wide, narrow = spec.num_heads * head, spec.num_kv_heads * head
        self.q = Linear(hidden, wide, ("hidden", "heads"), bias=spec.qkv_bias)
        self.k = Linear(hidden, narrow, ("hidden", "kv_heads"), bias=spec.qkv_bias)
        self.v = Linear(hidden, narrow, ("hidden", "kv_heads"), bias=spec.qkv_bias)
        self.o = Linear(wide, hidden, ("heads", "hidden"), bias=spec.output_bias)
        self.spec = spec

    def __call__(
        self,
        x: Float[Array, "T H"],
        rows: Rows,
        write: Bool[Array, " T"],
        pages: Pages,
        group: int,
        layer: int | Int32[Array, ""],
    ) -> tuple[Float[Array, "T H"], Pages]:
        spec = self.spec
        q = self.q(x).reshape(-1, spec.num_heads, spec.head_dim)
        k = self.k(x).reshape(-1, spec.num_kv_heads, spec.head_dim)
        v = self.v(x).reshape(-1, spec.num_kv_heads, spec.head_dim)
        if spec.rope is not None:
            q, k = rotate(q, rows.position, spec.rope), rotate(k, rows.position, spec.rope)
        table = rows.tables[group]
        arrays = write_rows(
            pages[group], {"k": k, "v": v}, layer, table, rows.request, rows.position, write
        )
        mixed = ragged_paged_attention(
            q,
            arrays["k"],
            arrays["v"],
            layer,
            table,
            rows.cu_q_lens,
            rows.kv_lens,
            scale=spec.head_dim**-0.5,
            window=spec.window,
        )
        pages = (*pages[:group], arrays, *pages[group + 1 :])
        return self.o(mixed.reshape(x.shape[0], -1)), pages


class ShortConv(nnx.Module):
    """Depthwise causal convolution with a residual, y_t = x_t + sum_j taps[j] * x_{t-K+1+j},
    float32.

    The raw inputs are cached by position: a row reads its K inputs from the cache after writing its
    own, so rows that may not write (already exact) also read what the cache holds.
    """

    def __init__(self, spec: LayerSpec, config: ModelConfig) -> None:
        self.taps = parameter((spec.conv_taps, config.hidden_size), ("taps", "hidden"), std=0.5)

    def __call__(
        self,
        x: Float[Array, "T H"],
        rows: Rows,
        write: Bool[Array, " T"],
        pages: Pages,
        group: int,
        layer: int | Int32[Array, ""],
    ) -> tuple[Float[Array, "T H"], Pages]:
        table = rows.tables[group]
        arrays = write_rows(
            pages[group], {"x": x}, layer, table, rows.request, rows.position, write
        )
        array, size = arrays["x"], arrays["x"].shape[2]
        taps = self.taps[...].astype(jnp.float32)
        position = rows.position[:, None] - jnp.arange(taps.shape[0])[::-1]  # [T, K]
        column = jnp.clip(position // size, 0, table.shape[1] - 1)
        inputs = array[layer, table[rows.request[:, None], column], position % size]
        inputs = jnp.where((position >= 0)[..., None], inputs.astype(jnp.float32), 0.0)
        y = x.astype(jnp.float32) + jnp.sum(inputs * taps, axis=1)
        return y.astype(x.dtype), (*pages[:group], arrays, *pages[group + 1 :])


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, arXiv 2002.05202)."""

    def __init__(self, spec: LayerSpec, config: ModelConfig) -> None:
        hidden, wide = config.hidden_size, spec.intermediate_size
        self.gate = Linear(hidden, wide, ("hidden", "mlp"))
        self.up = Linear(hidden, wide, ("hidden", "mlp"))
        self.down = Linear(wide, hidden, ("mlp", "hidden"))

    def __call__(self, x: Float[Array, "T H"]) -> Float[Array, "T H"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class DecoderLayer(nnx.Module):
    """Pre-norm residual block: attention (with an optional short convolution), then the MLP."""

    def __init__(self, spec: LayerSpec, config: ModelConfig) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, config)
        self.attention = Attention(spec, config)
        self.conv = ShortConv(spec, config) if spec.conv_taps else None
        self.mlp_norm = RMSNorm(config.hidden_size, config)
        self.mlp = GatedMLP(spec, config)

    def __call__(
        self,
        x: Float[Array, "T H"],
        rows: Rows,
        write: Bool[Array, " T"],
        pages: Pages,
        place: Place,
        depth: int | Int32[Array, ""] = 0,
    ) -> tuple[Float[Array, "T H"], Pages]:
        """`depth` is added to the place's layer indices: the scan index over stacked modules."""
        group, layer = place.attention
        mixed, pages = self.attention(
            self.attention_norm(x), rows, write, pages, group, layer + depth
        )
        if self.conv is not None and place.conv is not None:
            group, layer = place.conv
            mixed, pages = self.conv(mixed, rows, write, pages, group, layer + depth)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), pages
