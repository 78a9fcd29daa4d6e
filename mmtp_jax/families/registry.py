"""All families, and the way from config.json to a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from mmtp_jax.families import (
    deepseek_v3,
    glm4_moe,
    inkling,
    llama,
    mimo,
    mimo_v2,
    qwen2,
    qwen3,
    step3p5,
)
from mmtp_jax.families.blocks import stop_ids
from mmtp_jax.families.family import Family
from mmtp_jax.families.settings import Settings
from mmtp_jax.specs import ModelConfig
from mmtp_jax.weights.errors import ModelError

_MODULES = (llama, qwen2, qwen3, mimo, inkling, mimo_v2, step3p5, deepseek_v3, glm4_moe)
FAMILIES: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in _MODULES}


def parse_config(
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    tensor_names: Collection[str] | None = None,
) -> ModelConfig:
    """The model that config.json and generation_config.json (empty if absent) describe.

    `tensor_names` are the checkpoint's, None without weight files. Raises `ModelError` for an
    unknown architecture, a missing key, or a value that is not implemented.
    """
    family = _family(config)
    settings = Settings(config, tensor_names)
    defaults = Settings(generation, where="generation_config.json")
    try:
        model = family.parse(settings)
        if tensor_names is not None and _saved_by_transformers(config):
            if not _module_tensors(family, model) & set(tensor_names):
                model = replace(model, mtp=None)
        stops = (
            *stop_ids(defaults.token_ids("eos_token_id"), model.vocab_size),
            *model.eos_token_ids,
        )
        starts = (*defaults.token_ids("bos_token_id"), model.bos_token_id)
        return replace(model, eos_token_ids=tuple(dict.fromkeys(stops)), bos_token_id=starts[0])
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ModelError(f"config.json holds a value that cannot work: {error}") from None


def _saved_by_transformers(config: Mapping[str, Any]) -> bool:
    """Whether transformers 5 wrote the config: it saves the number of modules, but no module."""
    major, _, _ = str(config.get("transformers_version")).partition(".")
    return major.isdecimal() and int(major) >= 5


def _module_tensors(family: Family, model: ModelConfig) -> set[str]:
    return {
        name
        for path, source in family.sources(model).items()
        if path.startswith("mtp.")
        for name in source.names
    }


def _family(config: Mapping[str, Any]) -> Family:
    named = config.get("architectures") or [config.get("model_type")]
    if not isinstance(named, list):
        raise ModelError(f"config.json sets architectures={named!r}, which is not a list")
    for family in FAMILIES.values():
        if {family.name, *family.architectures, *family.model_types} & set(map(str, named)):
            return family
    supported = ", ".join(name for family in FAMILIES.values() for name in family.architectures)
    given = ", ".join(str(name) for name in named if name is not None)
    raise ModelError(
        f"architecture {given or '(none given)'} is not supported; supported: {supported}"
    )
