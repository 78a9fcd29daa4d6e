"""Rotary position embedding, with the scalings of long-context checkpoints."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mmtp_jax.specs import RopeConfig


def rotary_frequencies(rope: RopeConfig) -> Float[Array, " half"]:
    """Angular frequency of each rotated pair, float32."""
    exponent = jnp.arange(0, rope.dim, 2, dtype=jnp.float32) / rope.dim
    frequency = 1.0 / rope.theta**exponent
    if rope.scaling == "linear":
        return frequency / rope.factor
    if rope.scaling == "llama3":
        return _llama3(frequency, rope)
    if rope.scaling == "yarn":
        return _yarn(frequency, rope)
    return frequency


def _llama3(frequency: Float[Array, " half"], rope: RopeConfig) -> Float[Array, " half"]:
    """Long waves are stretched by `factor`, short ones kept (Llama 3.1 model card)."""
    wavelength = 2 * math.pi / frequency
    low = rope.original_max_position / rope.low_freq_factor
    high = rope.original_max_position / rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    mixed = (1 - smooth) * frequency / rope.factor + smooth * frequency
    scaled = jnp.where(wavelength > low, frequency / rope.factor, mixed)
    return jnp.where(wavelength < high, frequency, scaled)


def _yarn(frequency: Float[Array, " half"], rope: RopeConfig) -> Float[Array, " half"]:
    """Pairs that turn more than `beta_fast` times within the original context are kept, those that
    turn less than `beta_slow` times are stretched (arXiv 2309.00071, section 3.2)."""

    def pair_turning(turns: float) -> float:
        span = rope.original_max_position / (turns * 2 * math.pi)
        return rope.dim * math.log(span) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    ramp = (jnp.arange(rope.dim // 2, dtype=jnp.float32) - low) / (high - low)
    stretched = jnp.clip(ramp, 0.0, 1.0)
    return frequency / rope.factor * stretched + frequency * (1 - stretched)


def rotary_angles(
    position: Int[Array, " T"], rope: RopeConfig
) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
    """Cosines and sines of every rotated pair's angle, times the attention factor, float32."""
    angle = position.astype(jnp.float32)[:, None] * rotary_frequencies(rope)
    return jnp.cos(angle) * rope.attention_factor, jnp.sin(angle) * rope.attention_factor


def rotate(
    x: Float[Array, "T H D"], position: Int[Array, " T"], rope: RopeConfig
) -> Float[Array, "T H D"]:
    """Rotary embedding of the first `rope.dim` entries, float32 inside."""
    cos, sin = (part[:, None] for part in rotary_angles(position, rope))
    turned = x[..., : rope.dim].astype(jnp.float32)
    if rope.interleaved:
        pairs = turned.reshape(*turned.shape[:-1], rope.dim // 2, 2)
        first, second = pairs[..., 0], pairs[..., 1]
    else:
        first, second = jnp.split(turned, 2, axis=-1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    if rope.interleaved:
        turned = jnp.stack(parts, axis=-1).reshape(turned.shape)
    else:
        turned = jnp.concatenate(parts, axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., rope.dim :]], axis=-1)
