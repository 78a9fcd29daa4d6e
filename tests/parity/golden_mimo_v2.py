"""MiMo-V2-Flash with its three modules, each of which is fed the trunk's hidden states.

Oracle of the trunk: MiMoV2FlashForCausalLM. It does not know the released names of the layers'
pattern, thetas and epsilon, so it reads config_hf.json. Its sliding layers see
sliding_window_size + 1 keys (as SGLang does; vLLM sees one less), and so do the modules here.

transformers leaves the modules out. Here they are its own trunk with one sliding layer and a dense
MLP, in the wiring of SGLang (mimo_v2_nextn.py): eh_proj of [enorm(embedding), hnorm(hidden)], the
layer, final_layernorm, the shared head. Every module is fed the trunk's hidden state after the
final norm, never the module before: so do SGLang and, after measuring both, sglang-jax (PR #1256).
"""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from golden import Checkpoint, Golden, write_checkpoint
from hf_oracle import draw, first_clear, load, measure, released_shapes, split
from torch import nn
from transformers import MiMoV2FlashConfig, MiMoV2FlashModel
from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import MiMoV2FlashRMSNorm

MODULES = 3
MTP_FILE = "model_mtp.safetensors"  # not in the index
# The attention is sharp and the routers decided, so that tokens differ and use every expert.
SCALES = {
    "attention_sink_bias": 3.0,
    "embed_tokens": 10.0,
    "[qk]_proj": 1.5,
    r"mlp\.gate\.weight": 2.0,
    "e_score_correction_bias": 0.4,
}

CONFIG: dict[str, Any] = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_mimo_v2_flash.MiMoV2FlashConfig",
        "AutoModel": "modeling_mimo_v2_flash.MiMoV2FlashModel",
        "AutoModelForCausalLM": "modeling_mimo_v2_flash.MiMoV2FlashForCausalLM",
    },
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "attention_bias": False,
    "attention_chunk_size": 6,
    "attention_dropout": 0.0,
    "attention_value_scale": 0.707,
    "eos_token_id": 95,
    "head_dim": 12,
    "hidden_act": "silu",
    "hidden_size": 24,
    "hybrid_block_size": None,
    "hybrid_layer_pattern": [0, 1, 1, 0],
    "initializer_range": 0.02,
    "intermediate_size": 32,
    "layernorm_epsilon": 1e-3,
    "max_position_embeddings": 256,
    "model_type": "mimo_v2_flash",
    "moe_intermediate_size": 12,
    "moe_layer_freq": [0, 1, 1, 1],
    "n_group": 1,
    "n_routed_experts": 6,
    "n_shared_experts": None,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "partial_rotary_factor": 0.334,
    "rope_theta": 500,
    "routed_scaling_factor": None,
    "scoring_func": "sigmoid",
    "sliding_window": 6,
    "sliding_window_size": 6,
    "swa_head_dim": 12,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_rope_theta": 20,
    "swa_v_head_dim": 8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "v_head_dim": 8,
    "vocab_size": 96,
}


def build() -> list[Golden]:
    config_hf = _hf_dialect(CONFIG)
    trunk = released_shapes(config_hf)
    modules = _module_shapes(trunk)

    def attempt(seed: int) -> Golden:
        tensors = draw(trunk | modules, seed, SCALES)
        files = split({name: tensors[name] for name in trunk}, 2)
        checkpoint = Checkpoint(
            "mimo_v2_flash",
            CONFIG,
            files | {MTP_FILE: {name: tensors[name] for name in modules}},
            True,
            tuple(files),
            config_hf=config_hf,
        )
        with tempfile.TemporaryDirectory() as folder:
            model = load(write_checkpoint(replace(checkpoint, config=config_hf), Path(folder)))
        mtp = [Module(model.config, tensors, index).eval() for index in range(MODULES)]

        def rows(ids: torch.Tensor) -> list[torch.Tensor]:
            hidden = model.model(ids[None]).last_hidden_state
            embedded = model.get_input_embeddings()(ids[None])
            return [
                model.lm_head(module(embedded[:, 1 + m :], hidden[:, : -1 - m]))[0]
                for m, module in enumerate(mtp)
            ]

        return measure(checkpoint, model, rows, seed)

    return [first_clear(attempt)]


class Module(nn.Module):
    """MTP module `index` of the tensors, with a trunk of one sliding dense layer in it."""

    def __init__(self, config: MiMoV2FlashConfig, tensors: dict[str, Any], index: int) -> None:
        super().__init__()
        layer = {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]}
        config = config.from_dict(config.to_dict() | layer | {"num_hidden_layers": 1})
        self.enorm = MiMoV2FlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = MiMoV2FlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.trunk = MiMoV2FlashModel._from_config(config, attn_implementation="eager")
        start = f"model.mtp.layers.{index}."
        state = {
            _hf_name(name.removeprefix(start)): torch.as_tensor(tensor)
            for name, tensor in tensors.items()
            if name.startswith(start)
        }
        state["trunk.embed_tokens.weight"] = self.trunk.embed_tokens.weight  # not used
        self.load_state_dict(state)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The input of the head for token embeddings and hidden states [1, R, H]."""
        fused = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        return self.trunk(inputs_embeds=fused, use_cache=False).last_hidden_state


def _hf_name(name: str) -> str:
    """A parameter's name in `Module`, by the released one below model.mtp.layers.k."""
    if re.match(r"enorm|hnorm|eh_proj", name):
        return name
    if name.startswith("final_layernorm"):
        return "trunk.norm.weight"
    name = name.replace("pre_mlp_layernorm", "post_attention_layernorm")
    return "trunk.layers.0." + name.replace("attention_sink_bias", "sinks")


def _module_shapes(trunk: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes of the modules' tensors: attention as in layer 1, which slides, MLP as in layer 0."""
    hidden = trunk["model.norm.weight"]
    shapes: dict[str, tuple[int, ...]] = {}
    for module in range(MODULES):
        prefix = f"model.mtp.layers.{module}."
        for norm in ("enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm"):
            shapes[f"{prefix}{norm}.weight"] = hidden
        shapes[f"{prefix}eh_proj.weight"] = (*hidden, 2 * hidden[0])
        for layer, part in ((1, "self_attn."), (0, "mlp.")):
            start = f"model.layers.{layer}."
            shapes |= {
                prefix + name.removeprefix(start): shape
                for name, shape in trunk.items()
                if name.startswith(start + part)
            }
    return shapes


def _hf_dialect(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json that transformers writes for the model of a released one."""
    known = {field.name for field in fields(MiMoV2FlashConfig)}
    shared = {name: value for name, value in config.items() if name in known}
    kinds = ("full_attention", "sliding_attention")
    thetas = (config["rope_theta"], config["swa_rope_theta"])
    own = {
        "layer_types": [kinds[sliding] for sliding in config["hybrid_layer_pattern"]],
        "mlp_layer_types": [("dense", "sparse")[moe] for moe in config["moe_layer_freq"]],
        "rms_norm_eps": config["layernorm_epsilon"],
        "rope_parameters": {
            kind: {
                "rope_type": "default",
                "rope_theta": float(theta),
                "partial_rotary_factor": config["partial_rotary_factor"],
            }
            for kind, theta in zip(kinds, thetas, strict=True)
        },
        "sliding_window": config["sliding_window_size"] + 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        MiMoV2FlashConfig(**shared | own).save_pretrained(folder)
        return json.loads(Path(folder, "config.json").read_text())
