"""Short convolutions over a layer's streams, with inputs cached by position."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmtp_jax.cache.pages import Pages
from mmtp_jax.models.parts import parameter
from mmtp_jax.models.visit import Visit


class ShortConv(nnx.Module):
    """Depthwise causal convolution with a residual, y_t = x_t + sum_j taps[j] * x_{t-K+1+j},
    float32 (Inkling).

    The raw inputs are cached by position: a row reads its K inputs from the cache after writing its
    own, so rows that may not write (already exact) also read what the cache holds.
    """

    def __init__(self, stream: str, taps: int, width: int, axis: str = "hidden") -> None:
        self.stream = stream
        self.taps = parameter((taps, width), ("taps", axis), std=0.5)

    def __call__(
        self, x: Float[Array, "T C"], visit: Visit, pages: Pages
    ) -> tuple[Float[Array, "T C"], Pages]:
        assert visit.place.conv is not None
        arrays, layer, pages = visit.store(pages, visit.place.conv, {self.stream: x})
        table, rows = visit.rows.tables[visit.place.conv[0]], visit.rows
        array, size = arrays[self.stream], arrays[self.stream].shape[2]
        taps = self.taps[...].astype(jnp.float32)
        position = rows.position[:, None] - jnp.arange(taps.shape[0])[::-1]  # [T, K]
        column = jnp.clip(position // size, 0, table.shape[1] - 1)
        inputs = array[layer, table[rows.request[:, None], column], position % size]
        inputs = jnp.where((position >= 0)[..., None], inputs.astype(jnp.float32), 0.0)
        y = x.astype(jnp.float32) + jnp.sum(inputs * taps, axis=1)
        return y.astype(x.dtype), pages
