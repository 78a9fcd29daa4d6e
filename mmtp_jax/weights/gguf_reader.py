"""GGUF files of the llama and qwen2 architectures, presented under Hugging Face names.

Two things differ from a Hugging Face checkpoint. Matrices may be quantized in blocks along the
input; `gguf.quants` decodes them. And llama files order the rows of q and k for rotary pairs
(2i, 2i+1) instead of (i, i + head_dim/2): row 2i + j of a head is row j * head_dim/2 + i in the
Hugging Face order, which `read` restores. Qwen2 files keep the rows as they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import ReaderTensor
from gguf.quants import dequantize

from mmtp_jax.specs import AttentionSpec, DenseSpec, LayerSpec, ModelConfig, RopeConfig
from mmtp_jax.weights.errors import ModelError
from mmtp_jax.weights.gguf_metadata import metadata, open_gguf

_ARCHITECTURES = ("llama", "qwen2")
_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K")
_ROPE_DIVISORS = "rope_freqs.weight"

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

# Architecture keys that are read below, or that change nothing about the mathematics.
_KNOWN_KEYS = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "tensor_data_layout",
    "vocab_size",
}


class GGUFCheckpoint:
    """A GGUF file as a `Checkpoint`. Its tensors stay in the file until `read`."""

    def __init__(self, path: Path) -> None:
        reader = open_gguf(path)
        self.tokenizer_source = metadata(reader)
        stored = {tensor.name: tensor for tensor in reader.tensors}
        for name, tensor in stored.items():
            if tensor.tensor_type.name not in _TYPES:
                raise ModelError(
                    f"{path} stores {name} as {tensor.tensor_type.name};"
                    f" supported: {', '.join(_TYPES)}"
                )
        try:
            self.config = _parse_config(self.tokenizer_source, stored)
        except KeyError as error:
            raise ModelError(f"{path} lacks {error.args[0]}") from None
        except (ValueError, TypeError, ArithmeticError) as error:
            raise ModelError(f"{path} holds a value that cannot work: {error}") from None
        self._permuted = self.config.family == "llama"
        attention = self.config.layers[0].attention
        assert isinstance(attention, AttentionSpec)
        self._num_heads, self._num_kv_heads = attention.num_heads, attention.num_kv_heads
        self._tensors = {
            _hugging_face_name(name): tensor
            for name, tensor in stored.items()
            if name != _ROPE_DIVISORS  # part of the config
        }

    def names(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes by tensor name; a name that has no Hugging Face counterpart is left as it is."""
        return {name: _shape(tensor) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor as float32."""
        tensor = self._tensors[name]
        values = dequantize(tensor.data, tensor.tensor_type).reshape(_shape(tensor))
        if self._permuted and ".q_proj." in name:
            return unpermute(values, self._num_heads)
        if self._permuted and ".k_proj." in name:
            return unpermute(values, self._num_kv_heads)
        return values


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows (or a bias) [num_heads * head_dim, ...] from interleaved to half-split rotary order."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    # GGUF lists the fastest dimension first.
    return tuple(int(size) for size in reversed(tensor.shape))


def _hugging_face_name(name: str) -> str:
    if match := _LAYER_TENSOR.fullmatch(name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}" if part in _LAYER_NAMES else name
    stem, _, kind = name.rpartition(".")
    return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else name


def _parse_config(fields: Mapping[str, Any], tensors: Mapping[str, ReaderTensor]) -> ModelConfig:
    architecture = fields["general.architecture"]
    if architecture not in _ARCHITECTURES:
        raise ModelError(
            f"GGUF architecture {architecture!r} is not supported;"
            f" supported: {', '.join(_ARCHITECTURES)}"
        )
    prefix = f"{architecture}."
    keys = {key.removeprefix(prefix): v for key, v in fields.items() if key.startswith(prefix)}
    _refuse_unimplemented(keys, prefix)

    def get(key: str) -> Any:
        if key not in keys:
            raise KeyError(f"the key {prefix}{key}")
        return keys[key]

    heads = get("attention.head_count")
    head_dim = keys.get("attention.key_length", get("embedding_length") // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.get(key, head_dim) != head_dim:
            raise ModelError(f"{prefix}{key}={keys[key]} must equal the head size {head_dim}")
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=keys.get("attention.head_count_kv", heads),
        head_dim=head_dim,
        rope=_rope(keys.get("rope.freq_base", 10000.0), head_dim, tensors.get(_ROPE_DIVISORS)),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
    )
    if "token_embd.weight" not in tensors:
        raise KeyError("the tensor token_embd.weight")
    eos_keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    return ModelConfig(
        family=architecture,
        vocab_size=_shape(tensors["token_embd.weight"])[0],
        hidden_size=get("embedding_length"),
        layers=(LayerSpec(attention, DenseSpec(get("feed_forward_length"))),) * get("block_count"),
        max_position=get("context_length"),
        norm_eps=get("attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in tensors,
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(fields[key] for key in eos_keys if key in fields)),
    )


def _refuse_unimplemented(keys: Mapping[str, Any], prefix: str) -> None:
    if keys.get("nextn_predict_layers", 0):
        raise ModelError(
            f"{prefix}nextn_predict_layers: MTP modules in GGUF files are not implemented"
        )
    if keys.get("rope.scaling.type", "none") != "none":
        raise ModelError(
            f"{prefix}rope.scaling.type={keys['rope.scaling.type']!r} is not implemented"
        )
    for key, value in keys.items():
        if key not in _KNOWN_KEYS and value:
            raise ModelError(f"{prefix}{key}={value!r} is not implemented")


def _rope(theta: float, head_dim: int, divisors: ReaderTensor | None) -> RopeConfig:
    """The rotary embedding; the divisors of `rope_freqs.weight` must be those of Llama 3.

    GGUF stores the Llama 3 scaling as one divisor per frequency. Its largest is the factor, and
    the released models share the other three numbers, so the whole is known when they agree.
    """
    if divisors is None:
        return RopeConfig(dim=head_dim, theta=theta)
    stored = dequantize(divisors.data, divisors.tensor_type).reshape(-1)
    rope = RopeConfig(
        dim=head_dim,
        theta=theta,
        scaling="llama3",
        factor=float(stored.max()),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=8192,
    )
    expected = llama3_divisors(rope)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise ModelError(f"{_ROPE_DIVISORS} holds a rope scaling other than that of Llama 3")
    return rope


def llama3_divisors(rope: RopeConfig) -> np.ndarray:
    """What Llama 3 divides each of the dim/2 frequencies by (Llama 3.1 model card), float64."""
    wavelength = 2 * math.pi * rope.theta ** (np.arange(0, rope.dim, 2) / rope.dim)
    position = rope.original_max_position / wavelength
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = np.clip((position - rope.low_freq_factor) / span, 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / rope.factor + smooth))
