"""Gumbel noise in a kernel: the numbers of `jax.random.gumbel(..., mode="high")`.

The bits are those of Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", SC 2011) with jax's partitionable counters: number i of an array is the exclusive or of
both output words for the counter (0, i). `jax.random` itself does not lower to Triton.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA

Words = tuple[Array, Array]


def threefry(key: Words, counter: Words) -> Words:
    """Threefry-2x32 of uint32 words that broadcast."""
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    first, second = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            first = first + second
            left = lax.shift_left(second, jnp.full_like(second, rotation))
            right = lax.shift_right_logical(second, jnp.full_like(second, 32 - rotation))
            second = first ^ (left | right)
        first = first + keys[(group + 1) % 3]
        second = second + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return first, second


def token_key(seed: Array, index: Array) -> Words:
    """The key of the token at `index` (int32): `fold_in(key(seed), index)`; `seed` is uint32."""
    zero = jnp.zeros_like(seed)
    return threefry((zero, seed), (zero, index.astype(jnp.uint32)))


def gumbel_noise(key: Words, ids: Array, vocab_size: int) -> Array:
    """Float32 noise of the tokens `ids` (int32), as of an array of `vocab_size` numbers."""
    high = _uniform(key, ids)
    low = _uniform(key, ids + vocab_size)
    # Numbers below one half have twice the bits, so that noise reaches 44 and not just 16.
    x = jnp.where(high >= 0.5, high, high + 2.0**-23 * low + 2.0**-47)
    return -jnp.log(-jnp.log1p(-x))


def random_bits(key: Words, count: Array) -> Array:
    """The uint32 numbers of a random array at the places `count` (int32)."""
    count = count.astype(jnp.uint32)
    first, second = threefry(key, (jnp.zeros_like(count), count))
    return first ^ second


def _uniform(key: Words, count: Array) -> Array:
    """In [0, 1): 23 random bits as the mantissa of a float in [1, 2), less 1."""
    bits = random_bits(key, count)
    mantissa = lax.shift_right_logical(bits, jnp.full_like(bits, 9))
    return lax.bitcast_convert_type(mantissa | jnp.uint32(0x3F800000), jnp.float32) - 1.0
