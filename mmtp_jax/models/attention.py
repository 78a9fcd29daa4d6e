"""Grouped-query attention over the paged cache, with the options of every family."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from mmtp_jax.cache.pages import Pages
from mmtp_jax.models.conv import ShortConv
from mmtp_jax.models.parts import FusedLinear, Joined, Linear, RMSNorm, parameter
from mmtp_jax.models.rotary import rotary_angles, rotate
from mmtp_jax.models.sharding import by_heads
from mmtp_jax.models.visit import Visit, replaced
from mmtp_jax.specs import AttentionSpec, LogScaling, ModelConfig, RelativeBias
from pallas_kernels.kv_write import Rotation, rotate_and_write
from pallas_kernels.ragged_paged_attention import ragged_paged_attention


class Relative(nnx.Module):
    """Bias by distance (Inkling): rows [T, Hq, rank] times the table [rank, extent]."""

    def __init__(self, spec: RelativeBias, num_heads: int, hidden: int) -> None:
        self.rows = Linear(hidden, num_heads * spec.rank, ("hidden", "heads"))
        self.table = parameter((spec.rank, spec.extent), ("rank", "extent"), std=1.0)
        self.num_heads = num_heads

    def __call__(self, x: Float[Array, "T H"]) -> Float[Array, "T Hq d_rel"]:
        return self.rows(x).reshape(x.shape[0], self.num_heads, -1)


def log_scale(scaling: LogScaling, position: Int32[Array, " T"]) -> Float[Array, " T"]:
    """The factor of each row's attention logits, float32."""
    far = (position + 1).astype(jnp.float32) / scaling.floor
    return 1 + scaling.alpha * jnp.log(jnp.maximum(far, 1.0))


class Attention(nnx.Module):
    """Writes this pass's keys and values into the cache, then reads."""

    def __init__(self, spec: AttentionSpec, config: ModelConfig, conv_taps: int) -> None:
        hidden, heads, kv_heads = config.hidden_size, spec.num_heads, spec.num_kv_heads
        wide, narrow = kv_heads * spec.head_dim, kv_heads * spec.value_size
        # A key head's columns are those of its query heads, its key and its value, so that devices
        # that share the key heads have all that goes with them.
        queries = heads // kv_heads * spec.head_dim
        parts = (("q", queries), ("k", spec.head_dim), ("v", spec.value_size))
        self.qkv = FusedLinear(
            hidden,
            (kv_heads, sum(size for _, size in parts)),
            ("kv_heads", "head_columns"),
            Joined(-1, parts),
            bias=spec.qkv_bias,
        )
        self.o = Linear(heads * spec.value_size, hidden, ("heads", "hidden"), bias=spec.output_bias)
        self.q_norm = RMSNorm(spec.head_dim, config, "head_dim") if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, config, "head_dim") if spec.qk_norm else None
        self.k_conv = ShortConv("k", conv_taps, wide, "kv_heads") if conv_taps else None
        self.v_conv = ShortConv("v", conv_taps, narrow, "kv_heads") if conv_taps else None
        self.sinks = parameter((heads,), ("heads",), std=1.0) if spec.sinks else None
        self.gate = Linear(hidden, heads, ("hidden", "heads")) if spec.head_gate else None
        self.relative = (
            Relative(spec.relative, heads, hidden) if spec.relative is not None else None
        )
        self.spec = spec

    def __call__(
        self, x: Float[Array, "T H"], visit: Visit, pages: Pages
    ) -> tuple[Float[Array, "T H"], Pages]:
        spec, rows = self.spec, visit.rows
        if self.k_conv is None and spec.rope is not None and not spec.rope.interleaved:
            q, pages = self._rotate_and_store(x, visit, pages)
        else:
            q, pages = self._store(x, visit, pages)
        relative = None if self.relative is None else self.relative(x)
        if spec.log_scaling is not None:
            factor = log_scale(spec.log_scaling, rows.position + visit.ahead)[:, None, None]
            q = (q.astype(jnp.float32) * factor).astype(q.dtype)
            if relative is not None:
                relative = (relative.astype(jnp.float32) * factor).astype(relative.dtype)
        group, layer = visit.place.attention

        def attend(*arrays: Any) -> Float[Array, "T Hq Dv"]:
            *arguments, sinks, rel_rows, rel_table = arrays
            return ragged_paged_attention(
                *arguments,
                scale=spec.logit_scale,
                window=spec.window,
                sinks=sinks,
                rel_rows=rel_rows,
                rel_table=rel_table,
            )

        axes = (1, 3, 3, None, None, None, None, 0, 1, None)
        mixed = by_heads(attend, spec.num_kv_heads, axes, 1)(
            q,
            pages[group]["k"],
            pages[group]["v"],
            jnp.int32(layer + visit.depth),
            rows.tables[group],
            rows.cu_q_lens,
            rows.kv_lens,
            None if self.sinks is None else self.sinks[...],
            relative,
            None if self.relative is None else self.relative.table[...],
        )
        if self.gate is not None:
            mixed *= jax.nn.sigmoid(self.gate(x))[:, :, None]
        return self.o(mixed.reshape(len(x), -1)), pages

    def _rotate_and_store(
        self, x: Float[Array, "T H"], visit: Visit, pages: Pages
    ) -> tuple[Float[Array, "T Hq D"], Pages]:
        """Queries, and the pages with new keys and values: one kernel on a GPU."""
        spec, (group, layer) = self.spec, visit.place.attention
        assert spec.rope is not None
        rotation, q_scale, k_scale = Rotation(value_scale=spec.value_scale), None, None
        if self.q_norm is not None and self.k_norm is not None:
            q_scale, k_scale = self.q_norm.scale[...], self.k_norm.scale[...]
            rotation = Rotation(self.q_norm.eps, self.q_norm.one_plus, spec.value_scale)

        def write(*arrays: Any) -> tuple[Array, Array, Array]:
            *arguments, q_scale, k_scale = arrays
            return rotate_and_write(*arguments, rotation=rotation, q_scale=q_scale, k_scale=k_scale)

        axes = (1, 3, 3, None, None, None, None, None, None)
        q, k, v = by_heads(write, spec.num_kv_heads, axes, (1, 3, 3))(
            self.qkv(x),
            pages[group]["k"],
            pages[group]["v"],
            jnp.int32(layer + visit.depth),
            visit.slots(pages, group),
            *rotary_angles(visit.rows.position, spec.rope),
            q_scale,
            k_scale,
        )
        return q, replaced(pages, group, {"k": k, "v": v})

    def _store(
        self, x: Float[Array, "T H"], visit: Visit, pages: Pages
    ) -> tuple[Float[Array, "T Hq D"], Pages]:
        """The same in steps: with convolutions, interleaved pairs or no rotation."""
        spec, position = self.spec, visit.rows.position
        count, queries = len(x), spec.num_heads // spec.num_kv_heads * spec.head_dim
        q, k, v = jnp.split(self.qkv(x), [queries, queries + spec.head_dim], axis=-1)
        q = q.reshape(count, spec.num_heads, spec.head_dim)
        if self.k_conv is not None and self.v_conv is not None:
            shapes = k.shape, v.shape
            k, pages = self.k_conv(k.reshape(count, -1), visit, pages)
            v, pages = self.v_conv(v.reshape(count, -1), visit, pages)
            k, v = k.reshape(shapes[0]), v.reshape(shapes[1])
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if spec.rope is not None:
            q, k = rotate(q, position, spec.rope), rotate(k, position, spec.rope)
        if spec.value_scale != 1.0:
            v = v * jnp.asarray(spec.value_scale, v.dtype)
        return q, visit.store(pages, visit.place.attention, {"k": k, "v": v})[2]
