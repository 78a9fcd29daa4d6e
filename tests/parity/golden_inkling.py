"""Inkling: `inkling` with 4 modules, and the smaller `inkling_chain_norm` with 2 and a chain norm.

Oracle: InklingForConditionalGeneration and MtpModel. Two things of transformers 5.24.0 are changed:

* sliding modules get their window (its table of masks gives them a plain causal mask);
* the modules' embeddings pass through the backbone's embed_norm, as in vLLM and SGLang, whose
  drafts are accepted more often; `module_logits_raw_embed` keeps transformers' raw embeddings.

The log scaling of a global module takes the position of the consumed token, t+1+m, as transformers
does; vLLM takes t. The tensors of the vision and audio towers are there for loaders to skip.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from golden import Checkpoint, Golden, known_rows, write_checkpoint
from hf_oracle import (
    NUM_TOKENS,
    check_drafts,
    draw,
    first_clear,
    hf_dialect,
    load,
    measure,
    module_rows,
    released_shapes,
)
from transformers import AutoModelForImageTextToText
from transformers.masking_utils import (
    LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING,
    create_sliding_window_causal_mask,
)
from transformers.modeling_layers import MtpModel

LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING["hybrid_sliding"]["sliding_attention"] = (
    create_sliding_window_causal_mask
)

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
MTP_FILE = "mtp.safetensors"  # not in the index
SCALES = {
    r"llm\.embed\.weight": 5.0,
    r"llm\.embed_norm": 2.0,
    "unembed": 6.0,
    "sconv": 0.6,
    "rel_logits_proj": 2.0,
    "global_scale": 0.2,
    # Decided routers: every expert is used.
    r"gate\.weight": 2.0,
    r"gate\.bias": 0.6,
}
SHIFTS = {r"llm\.embed_norm": -0.4, "[qk]_norm": 0.6, "global_scale": 1.0}

# Inkling-Small; the largest logits are around 10 with this multiplier.
TEXT: dict[str, Any] = {
    "model_max_length": 256,
    "torch_dtype": "bfloat16",
    "hidden_size": 24,
    "num_hidden_layers": 6,
    "vocab_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_rel": 4,
    "rel_extent": 12,
    "q_bias": False,
    "o_bias": False,
    "log_scaling_n_floor": 8,
    "log_scaling_alpha": 0.3,
    "rms_norm_eps": 1e-3,
    "use_embed_norm": True,
    "local_layer_ids": [0, 1, 2, 3, 4],
    "dense_mlp_idx": 2,
    "use_sconv": True,
    "sconv_kernel_size": 4,
    "unpadded_vocab_size": 90,
    "logits_mup_width_multiplier": 2.0,
    "final_logit_softcapping": None,
    "swa_head_dim": 8,
    "swa_num_attention_heads": 6,
    "swa_num_key_value_heads": 3,
    "sliding_window_size": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "shared_expert_sink": True,
    "dense_intermediate_size": 32,
    "intermediate_size": 12,
    "route_scale": 2.0,
    "use_gate_bias": True,
    "gate_activation": "sigmoid",
    "norm_after_topk": True,
    "use_global_scale": True,
}
CONFIG: dict[str, Any] = {
    "architectures": ["InklingForConditionalGeneration"],
    "model_type": "inkling_mm_model",
    "eos_token_id": 89,
    "text_config": TEXT,
    "mtp_config": {
        "num_nextn_predict_layers": 4,
        "chain_hidden_post_norm": False,
        "local_layer_ids": [0, 2, 3],
    },
    "audio_config": {
        "decoder_dmodel": 24,
        "n_mel_bins": 2,
        "mel_vocab_size": 4,
        "bias": False,
        "dmel_min_value": -7.0,
        "dmel_max_value": 2.0,
        "use_audio_norm": True,
        "audio_mode": "dmel",
    },
    "vision_config": {
        "vision_encoder_type": "hmlp",
        "decoder_dmodel": 24,
        "patch_size": 2,
        "temporal_patch_size": 2,
        "n_channels": 3,
        "n_layers": 3,
        "use_vision_norm": True,
    },
}
CHAIN_NORM = CONFIG | {
    "text_config": TEXT | {"num_hidden_layers": 2, "local_layer_ids": [0], "dense_mlp_idx": 1},
    "mtp_config": {
        "num_nextn_predict_layers": 2,
        "chain_hidden_post_norm": True,
        "local_layer_ids": [1],
    },
}


def build() -> list[Golden]:
    return [_build("inkling", CONFIG), _build("inkling_chain_norm", CHAIN_NORM)]


def _build(family: str, config: dict[str, Any]) -> Golden:
    trunk = released_shapes(config, AutoModelForImageTextToText)
    modules = _module_shapes(trunk, config)
    config_hf = hf_dialect(config)

    def attempt(seed: int) -> Golden:
        tensors = draw(trunk | modules, seed, SCALES, SHIFTS)
        files: dict[str, dict[str, Any]] = {name: {} for name in (*SHARDS, MTP_FILE)}
        for name, tensor in tensors.items():
            shard = SHARDS[name >= "model.llm.layers.2."]
            files[MTP_FILE if name in modules else shard][name] = tensor
        checkpoint = Checkpoint(family, config, files, True, SHARDS, config_hf=config_hf)
        # transformers only finds modules in files of the index.
        indexed = replace(checkpoint, indexed=tuple(files))
        with tempfile.TemporaryDirectory() as folder:
            directory = write_checkpoint(indexed, Path(folder))
            model = load(directory, r"model\.mtp\.", AutoModelForImageTextToText)
            mtp = MtpModel.from_pretrained(model).eval()
        raw: list[np.ndarray] = []

        def rows(ids: torch.Tensor) -> list[torch.Tensor]:
            hidden = model.model(ids[None]).last_hidden_state[0]
            check_drafts(mtp, ids, hidden)
            raw.extend(row.numpy() for row in module_rows(mtp, ids, hidden))
            mtp.embed_tokens = model.get_input_embeddings()
            return module_rows(mtp, ids, hidden)

        golden = measure(checkpoint, model, rows, seed)
        for shard in golden.files.values():
            _cut_vision(shard)
        golden.extra["module_logits_raw_embed"] = known_rows(raw, NUM_TOKENS)
        return golden

    return first_clear(attempt)


def _module_shapes(
    trunk: dict[str, tuple[int, ...]], config: dict[str, Any]
) -> dict[str, tuple[int, ...]]:
    """Shapes of the modules' tensors: a layer of the trunk each, always with a dense MLP."""
    hidden = config["text_config"]["hidden_size"]
    local = config["text_config"]["local_layer_ids"]
    whole = next(i for i in range(config["text_config"]["num_hidden_layers"]) if i not in local)
    mtp = config["mtp_config"]
    shapes: dict[str, tuple[int, ...]] = {}
    for module in range(mtp["num_nextn_predict_layers"]):
        prefix = f"model.mtp.layers.{module}."
        shapes[f"{prefix}hidden_norm.weight"] = (hidden,)
        shapes[f"{prefix}embed_norm.weight"] = (hidden,)
        shapes[f"{prefix}input_proj.weight"] = (hidden, 2 * hidden)
        attention = local[0] if module in mtp["local_layer_ids"] else whole
        for layer, mlp in ((attention, False), (0, True)):
            start = f"model.llm.layers.{layer}."
            for name, shape in trunk.items():
                part = name.removeprefix(start)
                if name.startswith(start) and part.startswith("mlp.") == mlp:
                    shapes[f"{prefix}transformer_block.{part}"] = shape
    if mtp["chain_hidden_post_norm"]:
        shapes["model.mtp.chain_norm.weight"] = (hidden,)
    return shapes


def _cut_vision(tensors: dict[str, Any]) -> None:
    """Cut the vision tower's tensors to 8 in each dimension: transformers has none so small."""
    for name, tensor in tensors.items():
        if name.startswith("model.visual."):
            tensors[name] = tensor[tuple(slice(8) for _ in tensor.shape)]
