"""The noise of the kernel that chooses tokens is the noise of `jax.random`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmtp_jax.sampling.sampler import gumbel_noise as by_jax
from pallas_kernels.choose_token.noise import gumbel_noise, random_bits, token_key

CASES = [(0, 0, 300), (11, 5, 5000), (2**32 - 1, 2**31 - 1, 4097), (7, -(2**31), 1)]


@pytest.mark.parametrize("seed, index, vocab_size", CASES)
def test_bits_and_noise(seed: int, index: int, vocab_size: int) -> None:
    key = jax.random.fold_in(
        jax.random.key(jnp.uint32(seed), impl="threefry2x32"), jnp.int32(index)
    )
    words = token_key(jnp.uint32(seed), jnp.int32(index))
    ids = jnp.arange(2 * vocab_size)
    want = jax.random.bits(key, (2 * vocab_size,), jnp.uint32)
    np.testing.assert_array_equal(random_bits(words, ids), want)

    noise = gumbel_noise(words, ids[:vocab_size], vocab_size)
    like = by_jax(jnp.array([seed], jnp.uint32), jnp.array([index]), vocab_size)[0]
    np.testing.assert_allclose(noise, like, rtol=1e-6, atol=1e-6)
