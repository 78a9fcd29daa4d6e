"""Step-3.5-Flash with its three chained modules, which have heads of their own.

Oracle: Step3p7ForConditionalGeneration, whose text model this is (config_hf.json is its config),
and MtpModel with the sliding layers' number of heads. Two things differ from transformers 5.24.0:

* module 0 is fed the trunk's hidden state before the final norm, and the others the output of the
  module before ahead of its shared_head.norm, as in vLLM and SGLang (step3p5_mtp.py, PR #18564).
  transformers takes both after the norm; `module_logits_post` does so too.
* the heads are the modules' own, `transformer.shared_head.output`. Releases carry copies of the
  trunk's head there, which is what transformers uses; here they differ from it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from golden import Checkpoint, Golden, known_rows, write_checkpoint
from hf_oracle import (
    NUM_TOKENS,
    check_drafts,
    draw,
    first_clear,
    hf_dialect,
    load,
    load_modules,
    measure,
    module_rows,
    released_shapes,
    split,
)
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

LAYERS = 5
MODULES = 3
OUTPUT = "transformer.shared_head.output.weight"
MODULE_NAMES = rf"model\.layers\.({'|'.join(str(LAYERS + m) for m in range(MODULES))})\."
# Norms are zero-centred. The routers are decided, so that every expert is used, but the experts'
# outputs moderate, so that rounding does not grow.
SCALES = {
    r"moe\.down": 0.4,
    "embed_tokens": 3.0,
    r"shared_head\.output": 3.0,
    r"gate\.weight": 2.0,
    "router_bias": 0.4,
}
SHIFTS = {r"norm\.weight$": -1.0, "[qk]_norm": 0.3}

PERIOD = ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"]
CONFIG: dict[str, Any] = {
    "architectures": ["Step3p5ForCausalLM"],
    "model_type": "step3p5",
    "auto_map": {
        "AutoConfig": "configuration_step3p5.Step3p5Config",
        "AutoModelForCausalLM": "modeling_step3p5.Step3p5ForCausalLM",
    },
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "original_max_position_embeddings": 256,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
    "yarn_only_types": ["full_attention"],
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": LAYERS,
    "max_seq_len": 512,
    "vocab_size": 96,
    "torch_dtype": "bfloat16",
    "use_qk_norm": True,
    "moe_layers_enum": "2,3,4",
    "num_attention_heads": 4,
    "num_attention_groups": 2,
    "head_dim": 12,
    "use_moe": True,
    "moe_num_experts": 6,
    "moe_top_k": 2,
    "moe_intermediate_size": 10,
    "share_expert_dim": 14,
    "moe_layer_offset": 0,
    "moe_every_n_layer": 1,
    "norm_expert_weight": True,
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 3.0,
    "att_impl_type": "GQA",
    "tie_word_embeddings": False,
    "rope_theta": [500.0, 50.0, 50.0, 50.0] * 2,
    "use_head_wise_attn_gate": True,
    "sliding_window": 6,
    "use_moe_router_bias": True,
    "need_fp32_gate": True,
    "sink": False,
    "layer_types": PERIOD * 2,
    "use_rope_layers": [],
    "num_nextn_predict_layers": MODULES,
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 2,
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 6,
        "num_attention_groups": 2,
        "head_dim": 12,
        "true_head_dim": 12,
    },
    "swiglu_limits": [0.0, 0.0, 0.0, 0.5, 0.7, 0.0, 0.0, 0.0],
    "swiglu_limits_shared": [0.0, 0.0, 0.0, 0.0, 0.4, 0.0, 0.0, 0.0],
    "zero_centered": True,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": [1, 2, 95],
}
# Step-3.7: this text model and a vision tower, the smallest that transformers builds.
WHOLE: dict[str, Any] = {
    "architectures": ["Step3p7ForConditionalGeneration"],
    "model_type": "step3p7",
    "text_config": CONFIG,
    "vision_config": {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 56,
        "patch_size": 14,
        "mlp_ratio": 1.0,
    },
}


def build() -> list[Golden]:
    config_hf = hf_dialect(WHOLE)
    shapes = released_shapes(WHOLE, AutoModelForImageTextToText)
    text = {name: shape for name, shape in shapes.items() if not name.startswith("vi")}
    text |= _module_shapes(text)

    def attempt(seed: int) -> Golden:
        tensors = draw(shapes | text, seed, SCALES, SHIFTS)
        files = split({name: tensors[name] for name in text}, LAYERS)
        checkpoint = Checkpoint("step3p5", CONFIG, files, True, tuple(files), config_hf=config_hf)
        model, mtp = _load(tensors)
        heads = [torch.as_tensor(tensors[name]) for name in text if name.endswith(OUTPUT)]
        post: list[torch.Tensor] = []

        def rows(ids: torch.Tensor) -> list[torch.Tensor]:
            raw, normed = _trunk_hidden(model, ids)
            check_drafts(mtp, ids, normed)
            shared = [model.lm_head.weight] * MODULES
            for own, theirs in zip(
                _rows(mtp, shared, ids, normed, post=True),
                module_rows(mtp, ids, normed),
                strict=True,
            ):
                torch.testing.assert_close(own, theirs, rtol=0, atol=0)
            post.extend(_rows(mtp, heads, ids, normed, post=True))
            return _rows(mtp, heads, ids, raw, post=False)

        golden = measure(checkpoint, model, rows, seed)
        golden.extra["module_logits_post"] = known_rows([r.numpy() for r in post], NUM_TOKENS)
        return golden

    return [first_clear(attempt)]


def _load(tensors: dict[str, Any]) -> tuple[PreTrainedModel, MtpModel]:
    """The model and its modules as transformers reads them."""
    # transformers knows the name of a module's norm without `transformer`, and no head of its own.
    known = {
        name.replace("transformer.shared_head", "shared_head"): tensor
        for name, tensor in tensors.items()
        if not name.endswith(OUTPUT)
    }
    files = {"model.safetensors": known}
    with tempfile.TemporaryDirectory() as folder:
        directory = write_checkpoint(Checkpoint("step3p7", WHOLE, files, False, ()), Path(folder))
        model = load(directory, MODULE_NAMES, AutoModelForImageTextToText)
        # transformers forgets that the modules have the sliding layers' number of heads.
        heads = {"num_attention_heads": CONFIG["attention_other_setting"]["num_attention_heads"]}
        model.config.text_config.mtp_per_layer_config = dict.fromkeys(range(MODULES), heads)
        return model, load_modules(model, MODULE_NAMES)


def _trunk_hidden(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The trunk's last hidden states [T, H], before and after its final norm."""
    before: list[torch.Tensor] = []
    hook = model.model.language_model.norm.register_forward_pre_hook(
        lambda _, inputs: before.append(inputs[0][0])
    )
    after = model.model(ids[None]).last_hidden_state[0]
    hook.remove()
    return before[0], after


def _rows(
    mtp: MtpModel, heads: list[torch.Tensor], ids: torch.Tensor, feed: torch.Tensor, *, post: bool
) -> list[torch.Tensor]:
    """Teacher-forced logits of the modules with `heads` [V, H] of their own, [T-1-m, V] each.

    Module 0 is fed `feed` [T, H], the others the output of the module before, which with `post`
    has passed its norm.
    """
    rows, cache, feed = [], MtpCache(config=mtp.config), feed[None, :-1]
    for module, (layer, head) in enumerate(zip(mtp.layers, heads, strict=True)):
        known = ids[1 + module :]
        positions = torch.arange(1 + module, len(ids))
        layer.use_post_norm = False
        feed = mtp.forward_layer(
            module, feed[:, : len(known)], positions[None], cache, input_ids=known[None]
        )
        layer.use_post_norm = True
        normed = layer.post_norm(feed)
        rows.append((normed @ head.T)[0])
        feed = normed if post else feed
    return rows


def _module_shapes(trunk: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes of the modules' tensors: a layer like layer 1, which slides and has a dense MLP."""
    hidden = trunk["model.norm.weight"]
    shapes: dict[str, tuple[int, ...]] = {}
    for module in range(MODULES):
        prefix = f"model.layers.{LAYERS + module}."
        start = "model.layers.1."
        shapes |= {
            prefix + name.removeprefix(start): shape
            for name, shape in trunk.items()
            if name.startswith(start)
        }
        for norm in ("enorm", "hnorm", "transformer.shared_head.norm"):
            shapes[f"{prefix}{norm}.weight"] = hidden
        shapes[f"{prefix}eh_proj.weight"] = (*hidden, 2 * hidden[0])
        shapes[prefix + OUTPUT] = trunk["lm_head.weight"]
    return shapes
