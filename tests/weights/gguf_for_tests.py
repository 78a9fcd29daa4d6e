"""Tiny GGUF files, and decoders of their quantized blocks written out from the format."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from models_for_tests import tiny_config, tiny_tensors

LAYER_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHER_PARTS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in OTHER_PARTS:
        return f"{OTHER_PARTS[stem]}.{kind}"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{LAYER_PARTS[part]}.{kind}"


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Hugging Face rows in GGUF order, one row at a time as the format describes it."""
    size = len(rows) // heads
    out = np.empty_like(rows)
    for head in range(heads):
        for pair in range(size // 2):
            for half in range(2):
                source = head * size + half * (size // 2) + pair
                out[head * size + 2 * pair + half] = rows[source]
    return out


def write_tiny_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    seed: int = 0,
    keys: Mapping[str, Any] = {},
    replaced: Mapping[str, tuple[np.ndarray, GGMLQuantizationType]] = {},
    extra: Mapping[str, np.ndarray] = {},
    **changes: Any,
) -> tuple[Path, dict[str, np.ndarray]]:
    """Write the tiny model of `tiny_config`; the path and its tensors by Hugging Face name.

    `keys` sets or (None) leaves out metadata, `replaced` stores raw blocks under a Hugging Face
    name, `extra` adds tensors under their GGUF name.
    """
    config = tiny_config("qwen2" if architecture == "qwen2" else "llama", **changes)
    tensors = tiny_tensors(config, seed)
    metadata = {
        f"{architecture}.block_count": config["num_hidden_layers"],
        f"{architecture}.context_length": config["max_position_embeddings"],
        f"{architecture}.embedding_length": config["hidden_size"],
        f"{architecture}.feed_forward_length": config["intermediate_size"],
        f"{architecture}.attention.head_count": config["num_attention_heads"],
        f"{architecture}.attention.head_count_kv": config["num_key_value_heads"],
        f"{architecture}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{architecture}.attention.key_length": config["head_dim"],
        f"{architecture}.rope.freq_base": config["rope_theta"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | dict(keys)
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    for name, tensor in tensors.items():
        if name in replaced:
            writer.add_tensor(gguf_name(name), replaced[name][0], raw_dtype=replaced[name][1])
        elif architecture == "llama" and ".q_proj." in name:
            writer.add_tensor(gguf_name(name), permuted(tensor, config["num_attention_heads"]))
        elif architecture == "llama" and ".k_proj." in name:
            writer.add_tensor(gguf_name(name), permuted(tensor, config["num_key_value_heads"]))
        else:
            writer.add_tensor(gguf_name(name), tensor)
    for name, tensor in extra.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, tensors


# --- blocks: bytes -> values, after the layouts in ggml-common.h and ggml-quants.c ---


def half(data: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", data, at)[0])


def nibbles(data: bytes) -> list[int]:
    """Low nibbles of all bytes, then the high ones."""
    return [byte & 15 for byte in data] + [byte >> 4 for byte in data]


def q4_0(block: bytes) -> Iterator[float]:
    return (half(block, 0) * (q - 8) for q in nibbles(block[2:]))


def q4_1(block: bytes) -> Iterator[float]:
    return (half(block, 0) * q + half(block, 2) for q in nibbles(block[4:]))


def q5_0(block: bytes) -> Iterator[float]:
    (fifth,) = struct.unpack_from("<I", block, 2)
    for index, low in enumerate(nibbles(block[6:])):
        yield half(block, 0) * (low + 16 * (fifth >> index & 1) - 16)


def q8_0(block: bytes) -> Iterator[float]:
    return (half(block, 0) * q for q in struct.unpack_from("<32b", block, 2))


def q4_k(block: bytes) -> Iterator[float]:
    """Eight runs of 32 values; each has a 6-bit scale and a 6-bit minimum, packed in 12 bytes."""
    packed, quants = block[4:16], block[16:]
    for run in range(8):
        if run < 4:
            scale, minimum = packed[run] & 63, packed[run + 4] & 63
        else:
            scale = packed[run + 4] & 15 | packed[run - 4] >> 6 << 4
            minimum = packed[run + 4] >> 4 | packed[run] >> 6 << 4
        for index in range(32):
            byte = quants[run // 2 * 32 + index]
            q = byte >> 4 if run % 2 else byte & 15
            yield half(block, 0) * scale * q - half(block, 2) * minimum


def q6_k(block: bytes) -> Iterator[float]:
    """Two halves of 128 values; a value is 4 low bits and 2 high bits, minus 32, times a scale."""
    low, high, scales = block[:128], block[128:192], struct.unpack_from("<16b", block, 192)
    for index in range(256):
        part, within = divmod(index, 128)
        group, column = divmod(within, 32)
        byte = low[part * 64 + (group % 2) * 32 + column]
        four = byte >> 4 if group >= 2 else byte & 15
        two = high[part * 32 + column] >> 2 * group & 3
        yield half(block, 208) * scales[index // 16] * ((four | two << 4) - 32)


def float16(block: bytes) -> Iterator[float]:
    yield half(block, 0)


def bfloat16(block: bytes) -> Iterator[float]:
    yield float(struct.unpack("<f", b"\0\0" + block)[0])


DECODERS: dict[str, Callable[[bytes], Iterator[float]]] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q8_0": q8_0,
    "Q4_K": q4_k,
    "Q6_K": q6_k,
    "F16": float16,
    "BF16": bfloat16,
}

# Where the float16 numbers of a block lie.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q6_K": (208,),
    "F16": (0,),
    "BF16": (),
}


def random_blocks(
    kind: str, rows: int, columns: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Random stored bytes [rows, bytes] of a type, and the float32 [rows, columns] they mean."""
    rng = np.random.default_rng(seed)
    block_size, type_size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows * columns // block_size, type_size), np.uint8)
    if kind == "BF16":
        blocks[:, 1] &= 0xBF  # no infinities
    for at in HALVES[kind]:
        scale = rng.standard_normal(len(blocks)).astype("<f2")
        blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    values = [list(DECODERS[kind](block.tobytes())) for block in blocks]
    return blocks.reshape(rows, -1), np.asarray(values, np.float32).reshape(rows, columns)
