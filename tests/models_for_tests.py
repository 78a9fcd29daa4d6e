"""Models that tests load: the known small one, and tiny random ones written to a folder."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from mmtp_jax.weights.resolve import DEFAULT_MODEL, resolve_model

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "mimo": "MiMoForCausalLM",
}
DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
}

# The tiny tokenizer: one token per character, in this order, 64 in all.
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 \n.,?!:;'\"-()/_+*=<>|#@"
# As many, with what JSON needs.
JSON_CHARACTERS = CHARACTERS.translate(str.maketrans("|#@*", "{}[]"))
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@cache
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (93 MB, downloaded once per machine)."""
    return resolve_model(DEFAULT_MODEL)


def tiny_config(
    family: Literal["llama", "qwen2", "mimo"] = "llama", *, modules: int = 0, **changes: Any
) -> dict[str, Any]:
    """config.json of a tiny model; `changes` override or add keys (None removes a key)."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family == "mimo":
        config |= {"attention_bias": True, "num_nextn_predict_layers": modules}
    return {key: value for key, value in (config | changes).items() if value is not None}


def tiny_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors of such a model by Hugging Face name, linear layers as [out, in]."""
    rng = np.random.default_rng(seed)
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    llama = config["model_type"] == "llama"
    attention_bias = config.get("attention_bias", not llama)
    tensors: dict[str, np.ndarray] = {}

    def norm(name: str) -> None:
        tensors[f"{name}.weight"] = 1.0 + 0.1 * rng.standard_normal(hidden)

    def linear(name: str, outputs: int, inputs: int, bias: bool = False) -> None:
        tensors[f"{name}.weight"] = rng.standard_normal((outputs, inputs)) / np.sqrt(inputs)
        if bias:
            tensors[f"{name}.bias"] = 0.1 * rng.standard_normal(outputs)

    def layer(name: str) -> None:
        norm(f"{name}.input_layernorm")
        linear(f"{name}.self_attn.q_proj", queries, hidden, attention_bias)
        linear(f"{name}.self_attn.k_proj", keys, hidden, attention_bias)
        linear(f"{name}.self_attn.v_proj", keys, hidden, attention_bias)
        linear(f"{name}.self_attn.o_proj", hidden, queries, attention_bias and llama)
        norm(f"{name}.post_attention_layernorm")
        linear(f"{name}.mlp.gate_proj", wide, hidden)
        linear(f"{name}.mlp.up_proj", wide, hidden)
        linear(f"{name}.mlp.down_proj", hidden, wide)

    tensors["model.embed_tokens.weight"] = rng.standard_normal((config["vocab_size"], hidden))
    for index in range(config["num_hidden_layers"]):
        layer(f"model.layers.{index}")
    norm("model.norm")
    if not config["tie_word_embeddings"]:
        linear("lm_head", config["vocab_size"], hidden)
    for index in range(config.get("num_nextn_predict_layers", 0)):
        name = f"model.mtp_layers.{index}"
        norm(f"{name}.token_layernorm")
        norm(f"{name}.hidden_layernorm")
        linear(f"{name}.input_proj", hidden, 2 * hidden)
        layer(name)
        norm(f"{name}.final_layernorm")
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


def write_tiny_llama(
    directory: Path,
    *,
    modules: int = 0,
    seed: int = 0,
    family: Literal["llama", "qwen2", "mimo"] = "llama",
    tokenizer: bool = False,
    characters: str = CHARACTERS,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    shards: int = 1,
    **changes: Any,
) -> Path:
    """Write a tiny random model (vocabulary 64, hidden 32, 2 layers, 4/2 heads of 8); its folder.

    `modules` MTP modules need `family="mimo"`. `tokenizer` adds a tokenizer (of `characters`) and a
    chat template,
    `shards` spreads the tensors over several files with an index, `changes` override or add keys
    of config.json.
    """
    if modules and family != "mimo":
        raise ValueError("only a tiny model of the family 'mimo' ships MTP modules")
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, modules=modules, **changes)
    (directory / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}))
    tensors = {
        name: tensor.astype(DTYPES[dtype]) for name, tensor in tiny_tensors(config, seed).items()
    }
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
    else:
        _write_shards(directory, tensors, shards)
    if tokenizer:
        write_tiny_tokenizer(directory, characters)
    return directory


def write_tiny_tokenizer(directory: Path, characters: str = CHARACTERS) -> None:
    """A 64-token tokenizer, one token per (lower-case) character, with a chat template."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = [byte_level.pre_tokenize_str(character)[0][0] for character in characters]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *spelled])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def _write_shards(directory: Path, tensors: dict[str, np.ndarray], shards: int) -> None:
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        save_file(part, directory / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
