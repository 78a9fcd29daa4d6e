"""Rotary embedding of the oracle, one pair of entries at a time."""

from __future__ import annotations

import math

import numpy as np

from mmtp_jax.specs import RopeConfig


def rotated(x: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """x [T, heads, D] with the first `rope.dim` entries turned; row t is position t."""
    y, position, half = x.copy(), np.arange(len(x)), rope.dim // 2
    for pair in range(half):
        one, two = (2 * pair, 2 * pair + 1) if rope.interleaved else (pair, pair + half)
        angle = position * frequency(pair, rope)
        cos = rope.attention_factor * np.cos(angle)[:, None]
        sin = rope.attention_factor * np.sin(angle)[:, None]
        y[..., one] = x[..., one] * cos - x[..., two] * sin
        y[..., two] = x[..., one] * sin + x[..., two] * cos
    return y


def frequency(pair: int, rope: RopeConfig) -> float:
    """Radians per position of a pair."""
    plain = rope.theta ** (-2 * pair / rope.dim)
    slow = plain / rope.factor
    if rope.scaling is None:
        return plain
    if rope.scaling == "linear":
        return slow
    if rope.scaling == "yarn":
        kept = _kept_by_yarn(pair, rope)
    else:
        kept = _kept_by_llama3(plain, rope)
    return kept * plain + (1 - kept) * slow


def _kept_by_llama3(plain: float, rope: RopeConfig) -> float:
    """1 for pairs that turn often within the original context, 0 for those that hardly turn."""
    turns = rope.original_max_position * plain / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    return min(max((turns - low) / (high - low), 0.0), 1.0)


def _kept_by_yarn(pair: int, rope: RopeConfig) -> float:
    """1 up to the pair that turns `beta_fast` times, 0 from the one that turns `beta_slow` times,
    linear in the pair's index between."""

    def index(turns: float) -> float:
        wavelength = rope.original_max_position / turns
        return rope.dim / 2 * math.log(wavelength / (2 * math.pi), rope.theta)

    first, last = index(rope.beta_fast), index(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    if first == last:
        return float(pair <= first)
    return 1.0 - min(max((pair - first) / (last - first), 0.0), 1.0)
