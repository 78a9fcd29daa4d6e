"""Which checkpoint tensors fill which parameter.

Parameters have flat dotted paths (`layers.0.attention.q.kernel`), tensors have the names of their
release (`model.layers.0.self_attn.q_proj.weight`). Checkpoints store a linear layer as [out, in]; a
kernel is [in, out], so its source is transposed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mmtp_jax.specs import (
    AttentionSpec,
    DenseSpec,
    LatentAttentionSpec,
    LayerSpec,
    ModelConfig,
    MoESpec,
)

type Sources = dict[str, Source]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Source:
    """A parameter's tensors: one, or (`stacked`) one for each entry of its first dimension.

    `rows` takes every second of the tensor's rows, from 0 or 1 on. `transpose` swaps the last two
    dimensions. `taps`: a depthwise convolution, [channels, 1, taps] for a parameter [taps,
    channels].
    """

    names: tuple[str, ...]
    stacked: bool = False
    transpose: bool = False
    rows: int | None = None
    taps: bool = False

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of each tensor for a parameter of `shape`."""
        if self.stacked:
            shape = shape[1:]
        if self.taps:
            return (shape[1], 1, shape[0])
        if self.transpose:
            shape = (*shape[:-2], shape[-1], shape[-2])
        if self.rows is not None:
            shape = (*shape[:-2], 2 * shape[-2], shape[-1])
        return shape

    def value(
        self, read: Callable[[str], np.ndarray], shape: tuple[int, ...], dtype: np.dtype
    ) -> np.ndarray:
        """The parameter, from tensors read one at a time."""
        value = np.empty(shape, dtype)
        for index, name in enumerate(self.names):
            value[index if self.stacked else ...] = self._oriented(read(name))
        return value

    def _oriented(self, tensor: np.ndarray) -> np.ndarray:
        if self.taps:
            return tensor[:, 0].T
        if self.rows is not None:
            tensor = tensor[..., self.rows :: 2, :]
        return tensor.swapaxes(-1, -2) if self.transpose else tensor


def plain(path: str, name: str) -> Sources:
    """A parameter stored as it is."""
    return {path: Source((name,))}


def norm(path: str, name: str) -> Sources:
    return plain(f"{path}.scale", f"{name}.weight")


def linear(path: str, name: str, *, bias: bool = False) -> Sources:
    sources = {f"{path}.kernel": Source((f"{name}.weight",), transpose=True)}
    return sources | plain(f"{path}.bias", f"{name}.bias") if bias else sources


def dense_mlp(path: str, name: str) -> Sources:
    found: Sources = {}
    for part in ("gate", "up", "down"):
        found |= linear(f"{path}.{part}", f"{name}.{part}_proj")
    return found


def grouped_attention(path: str, name: str, spec: AttentionSpec) -> Sources:
    """`name` is the prefix of the projections, usually ending in "self_attn"."""
    found: Sources = {}
    for part in "qkvo":
        bias = spec.output_bias if part == "o" else spec.qkv_bias
        found |= linear(f"{path}.{part}", f"{name}.{part}_proj", bias=bias)
    if spec.qk_norm:
        found |= norm(f"{path}.q_norm", f"{name}.q_norm") | norm(f"{path}.k_norm", f"{name}.k_norm")
    if spec.sinks:
        found |= plain(f"{path}.sinks", f"{name}.attention_sink_bias")
    if spec.head_gate:
        found |= linear(f"{path}.gate", f"{name}.g_proj")
    return found


def latent_attention(path: str, name: str, spec: LatentAttentionSpec) -> Sources:
    """DeepSeek's names."""
    if spec.query_rank is None:
        found = linear(f"{path}.q", f"{name}.q_proj")
    else:
        found = linear(f"{path}.q_down", f"{name}.q_a_proj", bias=spec.bias)
        found |= norm(f"{path}.q_norm", f"{name}.q_a_layernorm")
        found |= linear(f"{path}.q_up", f"{name}.q_b_proj")
    found |= linear(f"{path}.kv_down", f"{name}.kv_a_proj_with_mqa", bias=spec.bias)
    found |= norm(f"{path}.kv_norm", f"{name}.kv_a_layernorm")
    found[f"{path}.kv_up"] = Source((f"{name}.kv_b_proj.weight",), transpose=True)
    return found | linear(f"{path}.o", f"{name}.o_proj", bias=spec.bias)


def mixture(path: str, name: str, spec: MoESpec) -> Sources:
    """DeepSeek's names: one tensor per expert and projection."""
    found = {f"{path}.router.kernel": Source((f"{name}.gate.weight",), transpose=True)}
    if spec.selection_bias:
        found |= plain(f"{path}.router.bias", f"{name}.gate.e_score_correction_bias")
    for part in ("gate", "up", "down"):
        names = tuple(
            f"{name}.experts.{expert}.{part}_proj.weight" for expert in range(spec.num_experts)
        )
        found[f"{path}.experts.{part}"] = Source(names, stacked=True, transpose=True)
    if spec.shared is not None:
        found |= dense_mlp(f"{path}.shared", f"{name}.shared_experts")
    return found


def layer(
    path: str, name: str, spec: LayerSpec, *, mlp_norm: str = "post_attention_layernorm"
) -> Sources:
    """A decoder block under the names that most families share."""
    found = norm(f"{path}.attention_norm", f"{name}.input_layernorm")
    found |= norm(f"{path}.mlp_norm", f"{name}.{mlp_norm}")
    if isinstance(spec.attention, AttentionSpec):
        found |= grouped_attention(f"{path}.attention", f"{name}.self_attn", spec.attention)
    else:
        found |= latent_attention(f"{path}.attention", f"{name}.self_attn", spec.attention)
    if isinstance(spec.mlp, DenseSpec):
        return found | dense_mlp(f"{path}.mlp", f"{name}.mlp")
    return found | mixture(f"{path}.mlp", f"{name}.mlp", spec.mlp)


def trunk(config: ModelConfig) -> Sources:
    """The target under the names that most families share."""
    found = plain("embed.weight", EMBEDDING) | norm("norm", "model.norm")
    if not config.tie_embeddings:
        found |= linear("head", HEAD.removesuffix(".weight"))
    for index, spec in enumerate(config.layers):
        found |= layer(f"layers.{index}", f"model.layers.{index}", spec)
    return found


def modules(config: ModelConfig) -> list[tuple[int, str, LayerSpec]]:
    """Number, parameter path and layer of every module."""
    specs = () if config.mtp is None else config.mtp.modules
    return [(index, f"mtp.{index}", spec) for index, spec in enumerate(specs)]


def deepseek_modules(config: ModelConfig) -> Sources:
    """Modules as further layers after the last (DeepSeek-V3, GLM-4.5)."""
    found: Sources = {}
    for index, path, spec in modules(config):
        name = f"model.layers.{len(config.layers) + index}"
        found |= norm(f"{path}.token_norm", f"{name}.enorm")
        found |= norm(f"{path}.hidden_norm", f"{name}.hnorm")
        found |= linear(f"{path}.fuse", f"{name}.eh_proj")
        found |= norm(f"{path}.norm", f"{name}.shared_head.norm")
        found |= layer(f"{path}.layer", name, spec)
    return found


def deepseek_copies(config: ModelConfig) -> dict[str, str]:
    """The embedding and the head that DeepSeek's modules repeat."""
    found = {}
    for index, _, _ in modules(config):
        name = f"model.layers.{len(config.layers) + index}"
        found[f"{name}.embed_tokens.weight"] = EMBEDDING
        found[f"{name}.shared_head.head.weight"] = EMBEDDING if config.tie_embeddings else HEAD
    return found
