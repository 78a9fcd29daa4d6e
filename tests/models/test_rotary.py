"""Rotary embeddings against formulas written out in NumPy."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from mmtp_jax.models.rotary import rotary_frequencies, rotate
from mmtp_jax.specs import RopeConfig


def llama3_frequency(frequency: float, rope: RopeConfig) -> float:
    """One frequency of Llama 3.1's scaling, case by case."""
    wavelength = 2 * math.pi / frequency
    if wavelength > rope.original_max_position / rope.low_freq_factor:
        return frequency / rope.factor
    if wavelength < rope.original_max_position / rope.high_freq_factor:
        return frequency
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    return (1 - smooth) * frequency / rope.factor + smooth * frequency


def test_llama3_scaling() -> None:
    rope = RopeConfig(
        128,
        theta=5e5,
        scaling="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=8192,
    )
    plain = [rope.theta ** (-2 * i / rope.dim) for i in range(rope.dim // 2)]
    want = [llama3_frequency(frequency, rope) for frequency in plain]
    assert want != plain and want[0] == plain[0] and want[-1] == plain[-1] / 8
    np.testing.assert_allclose(rotary_frequencies(rope), want, rtol=2e-6)


def test_partial_rotation_turns_pairs_half_a_rotation_apart() -> None:
    x = np.random.default_rng(0).standard_normal((5, 2, 8)).astype(np.float32)
    position = np.array([0, 1, 7, 100, 3], np.int32)
    rope = RopeConfig(4, theta=100.0)
    got = np.asarray(rotate(jnp.asarray(x), jnp.asarray(position), rope))
    np.testing.assert_array_equal(got[..., 4:], x[..., 4:])
    np.testing.assert_array_equal(got[0], x[0])
    for row, at in enumerate(position):
        for i in range(2):
            angle = at * 100.0 ** (-i / 2)
            a, b = x[row, :, i], x[row, :, i + 2]
            turned = a * math.cos(angle) - b * math.sin(angle)
            np.testing.assert_allclose(got[row, :, i], turned, atol=1e-5)
            turned = b * math.cos(angle) + a * math.sin(angle)
            np.testing.assert_allclose(got[row, :, i + 2], turned, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_pairs(interleaved: bool) -> None:
    """Entries (i, i + 2) or (2i, 2i + 1) turn by position * theta ** (-2i / dim)."""
    x = np.random.default_rng(1).standard_normal((3, 1, 6)).astype(np.float32)
    position = np.array([0, 2, 9], np.int32)
    rope = RopeConfig(4, theta=50.0, interleaved=interleaved, attention_factor=1.5)
    got = np.asarray(rotate(jnp.asarray(x), jnp.asarray(position), rope))
    np.testing.assert_array_equal(got[..., 4:], x[..., 4:])
    for row, at in enumerate(position):
        for i in range(2):
            first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + 2)
            turned = complex(x[row, 0, first], x[row, 0, second])
            turned *= 1.5 * np.exp(1j * at * 50.0 ** (-2 * i / 4))
            pair = complex(got[row, 0, first], got[row, 0, second])
            assert pair == pytest.approx(turned, abs=1e-5)


def test_linear_scaling() -> None:
    rope = RopeConfig(16, theta=1e4, scaling="linear", factor=4.0)
    want = [1e4 ** (-2 * i / 16) / 4 for i in range(8)]
    np.testing.assert_allclose(rotary_frequencies(rope), want, rtol=2e-6)


def yarn_frequency(index: int, rope: RopeConfig) -> float:
    """One frequency of yarn, after section 3.2 of the paper: how many times the pair turns within
    the original context decides between both ends; the ends are whole pairs if truncated."""
    frequency = rope.theta ** (-2 * index / rope.dim)

    def pair(turns: float) -> float:
        """The (fractional) pair that turns so often."""
        wavelength = rope.original_max_position / turns
        return rope.dim / 2 * math.log(wavelength / (2 * math.pi)) / math.log(rope.theta)

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    stretched = min(max((index - low) / (high - low), 0.0), 1.0)
    return frequency * (1 - stretched) + frequency / rope.factor * stretched


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(
    ("dim", "theta", "factor", "original", "beta_fast", "beta_slow"),
    [
        (64, 1e4, 40.0, 4096, 32.0, 1.0),  # DeepSeek-V3
        (128, 1e6, 4.0, 32768, 32.0, 1.0),  # Qwen2.5 and Qwen3
        (8, 100.0, 8.0, 128, 4.0, 0.25),
        (32, 1e4, 2.0, 64, 32.0, 1.0),  # both ends are cut off
    ],
)
def test_yarn_scaling(
    dim: int,
    theta: float,
    factor: float,
    original: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> None:
    rope = RopeConfig(
        dim,
        theta,
        scaling="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=truncate,
    )
    got = np.asarray(rotary_frequencies(rope))
    np.testing.assert_allclose(got, [yarn_frequency(i, rope) for i in range(dim // 2)], rtol=1e-5)
    plain = np.array([theta ** (-2 * i / dim) for i in range(dim // 2)])
    assert got[0] == pytest.approx(plain[0])
    assert (got <= plain * (1 + 1e-6)).all() and (got >= plain / factor * (1 - 1e-6)).all()
    assert (np.diff(got) < 0).all()


def test_yarn_of_deepseek_v3_keeps_the_first_pairs_and_stretches_the_last() -> None:
    """As its reference code computes them: pairs 0 to 10 unchanged, 23 to 31 divided by 40."""
    rope = RopeConfig(64, 1e4, scaling="yarn", factor=40.0, original_max_position=4096)
    plain = 1e4 ** (-np.arange(0, 64, 2) / 64)
    ratio = plain / np.asarray(rotary_frequencies(rope))
    np.testing.assert_allclose(ratio[:11], 1.0, rtol=1e-5)
    np.testing.assert_allclose(ratio[23:], 40.0, rtol=1e-5)
    assert (ratio[11:23] > 1.0).all() and (ratio[11:23] < 40.0).all()
