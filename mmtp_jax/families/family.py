"""What the loader has to know of a family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mmtp_jax.families.settings import Settings
from mmtp_jax.families.tensors import Sources
from mmtp_jax.specs import ModelConfig


def _no_copies(config: ModelConfig) -> dict[str, str]:
    return {}


@dataclass(frozen=True)
class Family:
    """A kind of checkpoint.

    `parse` reads config.json, `sources` says which tensors fill the parameters. `copies` maps
    tensors that repeat another one to it (they must be equal). Tensors whose name starts with one
    of `skipped` belong to vision or audio towers, which are not run. A config without
    `architectures` is known by its `model_type`: the name, or one of `model_types`. `published`
    are the parameter counts that model cards give, by number of layers (towers included).
    """

    name: str
    architectures: tuple[str, ...]
    parse: Callable[[Settings], ModelConfig]
    sources: Callable[[ModelConfig], Sources]
    copies: Callable[[ModelConfig], dict[str, str]] = _no_copies
    skipped: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    published: Mapping[int, float] = field(default_factory=dict)
