"""The decoder block."""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float

from mmtp_jax.cache.pages import Pages
from mmtp_jax.models.attention import Attention
from mmtp_jax.models.conv import ShortConv
from mmtp_jax.models.experts import MoE
from mmtp_jax.models.latent_attention import LatentAttention
from mmtp_jax.models.mlp import GatedMLP
from mmtp_jax.models.parts import RMSNorm
from mmtp_jax.models.visit import Visit
from mmtp_jax.specs import AttentionSpec, LayerSpec, ModelConfig, MoESpec


class DecoderLayer(nnx.Module):
    """Pre-norm residual block: attention, then the MLP; short convolutions inside the branches."""

    def __init__(self, spec: LayerSpec, config: ModelConfig) -> None:
        hidden, taps = config.hidden_size, spec.conv_taps
        self.attention_norm = RMSNorm(hidden, config)
        self.attention = (
            Attention(spec.attention, config, taps)
            if isinstance(spec.attention, AttentionSpec)
            else LatentAttention(spec.attention, config)
        )
        self.attention_conv = ShortConv("attention", taps, hidden) if taps else None
        self.mlp_norm = RMSNorm(hidden, config)
        self.mlp = (
            MoE(spec.mlp, hidden) if isinstance(spec.mlp, MoESpec) else GatedMLP(spec.mlp, hidden)
        )
        self.mlp_conv = ShortConv("mlp", taps, hidden) if taps else None

    def __call__(
        self, x: Float[Array, "T H"], visit: Visit, pages: Pages
    ) -> tuple[Float[Array, "T H"], Pages]:
        mixed, pages = self.attention(self.attention_norm(x), visit, pages)
        if self.attention_conv is not None:
            mixed, pages = self.attention_conv(mixed, visit, pages)
        x = x + mixed
        mixed = self.mlp(self.mlp_norm(x))
        if self.mlp_conv is not None:
            mixed, pages = self.mlp_conv(mixed, visit, pages)
        return x + mixed, pages
