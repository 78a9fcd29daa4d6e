"""Tiny LLMs that the tests of the Python API share, and their weights as the oracle wants them.

One bucket of 16 rows: an engine compiles one step, and engines of equal shapes hit the cache of
compiled programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax.numpy as jnp
import numpy as np
from models_for_tests import CHARACTERS, tiny_config, tiny_tensors, write_tiny_llama
from oracle import Oracle

from mmtp_jax.config import engine_config
from mmtp_jax.llm import LLM
from mmtp_jax.loader import LoadedModel, load_model

MODULES = 3
VOCAB = 64
EOS = 2
MAX_MODEL_LEN = 96
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "row_multiple": 16,
    "page_size": 4,
    "num_pages": 128,
    "max_model_len": MAX_MODEL_LEN,
}
PLAIN = {"method": None}
"""A speculative_config without speculation."""


@cache
def tiny_model(tokenizer: bool = True, k: int = MODULES) -> LoadedModel:
    """The tiny model of family "mimo" with three random modules, `k` of them in use."""
    return load_tiny({"num_speculative_tokens": k}, tokenizer=tokenizer)


def load_tiny(
    speculative: Mapping[str, Any],
    *,
    tokenizer: bool = True,
    characters: str = CHARACTERS,
    **options: Any,
) -> LoadedModel:
    """The tiny model from its files."""
    with TemporaryDirectory() as folder:
        path = write_tiny_llama(
            Path(folder),
            modules=MODULES,
            family="mimo",
            tokenizer=tokenizer,
            characters=characters,
        )
        return load_model(engine_config(str(path), speculative, **(OPTIONS | options)))


@cache
def tiny_llm(k: int = MODULES) -> LLM:
    """An engine over the tiny model, for all tests of a process."""
    return LLM.from_loaded(tiny_model(k=k))


@cache
def tiny_oracle() -> Oracle:
    """The float64 model over the weights that the checkpoint holds."""
    return Oracle(tiny_model().graph.config, checkpoint_values().__getitem__)


@cache
def checkpoint_values() -> dict[str, np.ndarray]:
    """The tensors of the tiny checkpoint by parameter name, kernels as [in, out]."""
    tensors = tiny_tensors(tiny_config("mimo", modules=MODULES))
    values = {
        "embed.weight": tensors["model.embed_tokens.weight"],
        "norm.scale": tensors["model.norm.weight"],
        "head.kernel": tensors["lm_head.weight"].T,
    }
    blocks = [(f"layers.{i}", f"model.layers.{i}") for i in range(2)]
    blocks += [(f"mtp.{i}.layer", f"model.mtp_layers.{i}") for i in range(MODULES)]
    for path, name in blocks:
        values[f"{path}.attention_norm.scale"] = tensors[f"{name}.input_layernorm.weight"]
        values[f"{path}.mlp_norm.scale"] = tensors[f"{name}.post_attention_layernorm.weight"]
        for part in "qkvo":
            source = f"{name}.self_attn.{part}_proj"
            values[f"{path}.attention.{part}.kernel"] = tensors[f"{source}.weight"].T
            if part != "o":
                values[f"{path}.attention.{part}.bias"] = tensors[f"{source}.bias"]
        for part in ("gate", "up", "down"):
            values[f"{path}.mlp.{part}.kernel"] = tensors[f"{name}.mlp.{part}_proj.weight"].T
    for index in range(MODULES):
        path, name = f"mtp.{index}", f"model.mtp_layers.{index}"
        values[f"{path}.token_norm.scale"] = tensors[f"{name}.token_layernorm.weight"]
        values[f"{path}.hidden_norm.scale"] = tensors[f"{name}.hidden_layernorm.weight"]
        values[f"{path}.fuse.kernel"] = tensors[f"{name}.input_proj.weight"].T
        values[f"{path}.norm.scale"] = tensors[f"{name}.final_layernorm.weight"]
    return values


def parameters(loaded: LoadedModel) -> dict[str, np.ndarray]:
    """The parameters of a loaded model by name, in float32."""
    values: dict[str, np.ndarray] = {}
    for leaf, param in zip(loaded.graph.leaves(), loaded.params, strict=True):
        array = np.asarray(param.astype(jnp.float32))
        for piece in leaf.pieces:
            values[piece.name] = array[piece.place].reshape(piece.shape)
    return values


def prompt_ids(length: int, seed: int = 0) -> list[int]:
    """Random token ids, none of them special."""
    return np.random.default_rng([seed, length]).integers(5, VOCAB, length).tolist()


def assert_idle(llm: LLM) -> None:
    """No request is left, and every page came back."""
    stats = llm.stats()
    assert (stats["requests_running"], stats["requests_waiting"]) == (0, 0)
    for group in stats["pages"]:
        assert (group["referenced"], group["free"]) == (0, group["total"])
