"""Which checkpoint tensor fills which parameter.

Parameters have flat dotted paths (`layers.0.attention.q.kernel`), tensors have their Hugging Face
names (`model.layers.0.self_attn.q_proj.weight`). Checkpoints store a linear layer as [out, in]; a
kernel is [in, out], so its source is transposed. The MTP names are those of the MiMo-7B checkpoint,
with one `model.mtp_layers.{m}` block per module.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mmtp_jax.config import LayerSpec, ModelConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

_MODULE = re.compile(r"model\.mtp_layers\.(\d+)\.")


@dataclass(frozen=True)
class TensorSource:
    """A checkpoint tensor, and whether it is stored transposed with respect to the parameter."""

    name: str
    transpose: bool


def parameter_sources(config: ModelConfig) -> dict[str, TensorSource]:
    """The source of every parameter of `config`, by parameter path.

    Covers the target and `config.num_modules` MTP modules. `head.kernel` is absent when the
    embeddings are tied.
    """
    sources = {
        "embed.weight": TensorSource(EMBEDDING, transpose=False),
        "norm.scale": TensorSource("model.norm.weight", transpose=False),
    }
    if not config.tie_embeddings:
        sources["head.kernel"] = TensorSource(HEAD, transpose=True)
    for index, layer in enumerate(config.layers):
        sources |= _layer_sources(layer, f"layers.{index}", f"model.layers.{index}")
    modules = () if config.mtp is None else config.mtp.modules
    for index, layer in enumerate(modules):
        path, name = f"mtp.{index}", f"model.mtp_layers.{index}"
        sources |= {
            f"{path}.token_norm.scale": TensorSource(f"{name}.token_layernorm.weight", False),
            f"{path}.hidden_norm.scale": TensorSource(f"{name}.hidden_layernorm.weight", False),
            f"{path}.fuse.kernel": TensorSource(f"{name}.input_proj.weight", True),
            f"{path}.norm.scale": TensorSource(f"{name}.final_layernorm.weight", False),
        }
        sources |= _layer_sources(layer, f"{path}.layer", name)
    return sources


def module_index(name: str) -> int | None:
    """The MTP module that the tensor `name` belongs to, None for the target's own tensors."""
    match = _MODULE.match(name)
    return None if match is None else int(match[1])


def _layer_sources(layer: LayerSpec, path: str, name: str) -> dict[str, TensorSource]:
    sources = {
        f"{path}.attention_norm.scale": TensorSource(f"{name}.input_layernorm.weight", False),
        f"{path}.mlp_norm.scale": TensorSource(f"{name}.post_attention_layernorm.weight", False),
    }
    for part in "qkvo":
        source = f"{name}.self_attn.{part}_proj"
        sources[f"{path}.attention.{part}.kernel"] = TensorSource(f"{source}.weight", True)
        if layer.output_bias if part == "o" else layer.qkv_bias:
            sources[f"{path}.attention.{part}.bias"] = TensorSource(f"{source}.bias", False)
    for part in ("gate", "up", "down"):
        sources[f"{path}.mlp.{part}.kernel"] = TensorSource(f"{name}.mlp.{part}_proj.weight", True)
    return sources
