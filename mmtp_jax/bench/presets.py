"""The models that the benchmark knows by name, and how it loads any model.

An architecture without weights is a config.json here; its weights are random. Ids in, ids out: no
tokenizer is needed.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from mmtp_jax.config import CacheConfig, EngineConfig, SpeculativeConfig
from mmtp_jax.loader import LoadedModel, load_model
from mmtp_jax.modules.default import default_modules
from mmtp_jax.weights.checkpoint import open_checkpoint
from mmtp_jax.weights.resolve import DEFAULT_MODEL, resolve_model

NAMES = {"smollm2-135m": DEFAULT_MODEL}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    # Llama 3.1 8B (model card).
    "llama3-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "eos_token_id": 128001,
    },
    # Inkling (model card of thinkingmachines/Inkling) with fewer and smaller layers, experts and
    # tokens: 2 B parameters. The pattern of layers, the kinds of experts and the modules are its.
    "inkling-2b": {
        "architectures": ["InklingForConditionalGeneration"],
        "model_type": "inkling_mm_model",
        "eos_token_id": 65000,
        "text_config": {
            "vocab_size": 65536,
            "unpadded_vocab_size": 65100,
            "hidden_size": 1536,
            "num_hidden_layers": 18,
            "model_max_length": 131072,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "swa_num_attention_heads": 12,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 128,
            "sliding_window_size": 512,
            "local_layer_ids": [index for index in range(18) if (index + 1) % 6],
            "d_rel": 16,
            "rel_extent": 1024,
            "log_scaling_n_floor": 128000,
            "log_scaling_alpha": 0.1,
            "rms_norm_eps": 1e-6,
            "logits_mup_width_multiplier": 6.0,
            "sconv_kernel_size": 4,
            "dense_mlp_idx": 2,
            "dense_intermediate_size": 6144,
            "intermediate_size": 512,
            "n_routed_experts": 32,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "route_scale": 8.0,
        },
        "mtp_config": {"num_nextn_predict_layers": 8, "local_layer_ids": [0, 2, 4, 5, 6, 7]},
    },
}


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """What the options of every command say about the model; `model` can be loaded."""

    model: str
    load_format: Literal["auto", "dummy"]
    dtype: str
    seed: int
    hf_overrides: dict[str, Any]
    tensor_parallel_size: int
    speculative_model: str | None = None

    def load(self, num_speculative_tokens: int, *, max_model_len: int) -> LoadedModel:
        """The model for an engine without a prefix cache, with the modules of `speculative_model`,
        those that come with this package or its own; they are random if there are none."""
        random = bool(num_speculative_tokens) and not self._has_modules()
        speculative = SpeculativeConfig(
            num_speculative_tokens=num_speculative_tokens,
            load_format="dummy" if random else "auto",
            model=self.speculative_model,
        )
        options = dataclasses.asdict(self)
        del options["speculative_model"]
        config = EngineConfig(
            **options,
            max_model_len=max_model_len,
            cache=CacheConfig(enable_prefix_caching=False),
            speculative=speculative,
        )
        return load_model(config)

    def _has_modules(self) -> bool:
        weights = self.load_format != "dummy"
        if self.speculative_model is not None:
            return True
        if weights and default_modules(self.model) is not None:
            return True
        path = resolve_model(self.model)
        return open_checkpoint(path, self.hf_overrides, with_weights=weights).config.mtp is not None


@contextmanager
def loadable(model: str, load_format: str) -> Iterator[tuple[str, Literal["auto", "dummy"]]]:
    """What the loader takes for the name of a preset or of any other model, and its format."""
    form: Literal["auto", "dummy"] = "dummy" if load_format == "dummy" else "auto"
    if model not in ARCHITECTURES:
        yield NAMES.get(model, model), form
        return
    with tempfile.TemporaryDirectory(prefix="mmtp-bench-") as folder:
        write_config(Path(folder), ARCHITECTURES[model])
        yield folder, "dummy"


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """A model directory that holds a config.json and nothing else."""
    (folder / "config.json").write_text(json.dumps(config))
