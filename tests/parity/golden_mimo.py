"""MiMo-7B with the one module of its release, and with two.

The trunk is Qwen2 under another name, so transformers (which has no MiMo-7B) computes it with
Qwen2ForCausalLM. There is no oracle for the modules: they are written down here around its
Qwen2DecoderLayer, after the MiMo-7B model card and vLLM's mimo_mtp.py. At slot t, module m reads

    input_proj [ hidden_layernorm(u) ; token_layernorm(e) ]

where e is the embedding of token t+1+m, zero in slot 0, and u is the trunk's hidden state *before*
its final norm for module 0, else the output of module m-1. One Qwen2 layer and `final_layernorm`
follow; the result goes to the trunk's head and to module m+1. The release has one module, so its
chain is a convention: that of mmtp_jax.
"""

from __future__ import annotations

from typing import Any

import torch
from golden import Checkpoint, Golden
from hf_oracle import draw, first_clear, measure, released_shapes
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

# MiMo-7B-RL.
CONFIG: dict[str, Any] = {
    "architectures": ["MiMoForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_mimo.MiMoConfig",
        "AutoModel": "modeling_mimo.MiMoModel",
        "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
    },
    "bos_token_id": 93,
    "eos_token_id": 95,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 24,
    "max_position_embeddings": 512,
    "max_window_layers": 2,
    "model_type": "mimo",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 640000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 96,
}


class Module(Qwen2DecoderLayer):
    """A module; its parameters have the released names."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__(config, layer_idx=0)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.token_layernorm = Qwen2RMSNorm(hidden, eps)
        self.hidden_layernorm = Qwen2RMSNorm(hidden, eps)
        self.final_layernorm = Qwen2RMSNorm(hidden, eps)
        self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(
        self,
        embedded: torch.Tensor,
        feed: torch.Tensor,
        mask: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """[1, R, H] of both inputs, an additive mask [1, 1, R, R], cos and sin: [1, R, H]."""
        pair = torch.cat([self.hidden_layernorm(feed), self.token_layernorm(embedded)], dim=-1)
        return self.final_layernorm(
            super().forward(self.input_proj(pair), mask, position_embeddings=rotation)
        )


def build() -> list[Golden]:
    return [_build("mimo", 1), _build("mimo_two_modules", 2)]


def _build(family: str, count: int) -> Golden:
    config = CONFIG | {"num_nextn_predict_layers": count}
    as_qwen2 = config | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    del as_qwen2["auto_map"]
    trunk_shapes = released_shapes(as_qwen2)
    qwen2 = Qwen2Config.from_dict(as_qwen2, attn_implementation="eager")
    names = [f"model.mtp_layers.{module}." for module in range(count)]
    module_shapes = {
        name + key: tuple(tensor.shape)
        for name in names
        for key, tensor in Module(qwen2).state_dict().items()
    }

    def attempt(seed: int) -> Golden:
        tensors = draw(trunk_shapes | module_shapes, seed, {})
        trunk = {name: torch.tensor(tensors[name]) for name in trunk_shapes}
        model = Qwen2ForCausalLM(qwen2).eval()
        model.load_state_dict(trunk)
        modules = []
        for name in names:
            own = {k.removeprefix(name): torch.tensor(tensors[k]) for k in tensors if name in k}
            modules.append(Module(qwen2).eval())
            modules[-1].load_state_dict(own)
        files = {
            "model-00001-of-00002.safetensors": {name: tensors[name] for name in trunk_shapes},
            "model-00002-of-00002.safetensors": {name: tensors[name] for name in module_shapes},
        }
        checkpoint = Checkpoint(family, config, files, True, tuple(files))
        return measure(checkpoint, model, lambda ids: _rows(model, modules, ids), seed)

    return first_clear(attempt)


def _rows(model: Qwen2ForCausalLM, modules: list[Module], ids: torch.Tensor) -> list[torch.Tensor]:
    """Teacher-forced logits [T-1-m, V] of every module m."""
    before_norm: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, x: before_norm.append(x[0]))
    model.model(ids[None])
    hook.remove()
    rows, feed = [], before_norm[0]
    for module, layer in enumerate(modules):
        embedded = model.model.embed_tokens(ids[None, 1 + module :]).clone()
        embedded[:, 0] = 0.0
        count = embedded.shape[1]
        mask = torch.full((1, 1, count, count), -torch.inf).triu(1)
        rotation = model.model.rotary_emb(embedded, torch.arange(count)[None])
        feed = layer(embedded, feed[:, :count], mask, rotation)
        rows.append(model.lm_head(feed)[0])
    return rows
