"""Rotary embeddings in both dialects of config.json.

`rope_theta` with `rope_scaling`, or `rope_parameters` (transformers 5), which may hold one object
per kind of layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mmtp_jax.families.settings import Settings
from mmtp_jax.specs import RopeConfig

_UNSCALED = RopeConfig(dim=2)


@dataclass(frozen=True)
class Scaling:
    """The part of a rotary embedding that does not depend on the layer: everything but `dim` and
    `theta` (None where only the layer says it).

    `mscale_all_dim` scales the logits of latent attention.
    """

    theta: float | None = None
    partial: float | None = None
    rope: RopeConfig = _UNSCALED
    mscale_all_dim: float = 0.0

    def logit_factor(self) -> float:
        """What DeepSeek's models multiply attention logits by under yarn."""
        if self.rope.scaling != "yarn" or not self.mscale_all_dim:
            return 1.0
        return _mscale(self.rope.factor, self.mscale_all_dim) ** 2


def read_rope(settings: Settings, theta: float = 10000.0) -> Scaling:
    """The one rotary embedding of a model; `theta` is the family's default."""
    theta = settings.number("rope_theta", theta)
    partial = settings.number("partial_rotary_factor", None)
    limit = settings.integer("max_position_embeddings")
    parameters, scaling = settings.table("rope_parameters"), settings.table("rope_scaling")
    table = parameters or scaling
    return Scaling(theta, partial) if table is None else read_scaling(table, theta, partial, limit)


def read_scaling(
    table: Settings, theta: float | None, partial: float | None, limit: int
) -> Scaling:
    """One object of `rope_scaling` or `rope_parameters`; the arguments hold where it is silent."""
    theta = table.number("rope_theta", theta)
    partial = table.number("partial_rotary_factor", partial)
    kind = table.text("rope_type", None) or table.text("type", "default")
    table.only("type", kind)
    if kind == "default":
        return Scaling(theta, partial)
    if kind == "linear":
        rope = RopeConfig(dim=2, scaling="linear", factor=table.number("factor"))
        return Scaling(theta, partial, rope)
    if kind == "llama3":
        rope = RopeConfig(
            dim=2,
            scaling="llama3",
            factor=table.number("factor"),
            low_freq_factor=table.number("low_freq_factor"),
            high_freq_factor=table.number("high_freq_factor"),
            original_max_position=table.integer("original_max_position_embeddings", limit),
        )
        return Scaling(theta, partial, rope)
    if kind == "yarn":
        return _read_yarn(table, theta, partial, limit)
    raise table.error(
        f"rope type {kind!r} is not implemented; implemented: default, linear, llama3, yarn"
    )


def _read_yarn(table: Settings, theta: float | None, partial: float | None, limit: int) -> Scaling:
    original = table.integer("original_max_position_embeddings", limit)
    factor = table.number("factor", None)
    if factor is None:
        factor = limit / original
    mscale = table.number("mscale", 0.0)
    mscale_all_dim = table.number("mscale_all_dim", 0.0)
    attention_factor = table.number("attention_factor", None)
    if attention_factor is None:
        attention_factor = _mscale(factor, 1.0)
        if mscale and mscale_all_dim:
            attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    rope = RopeConfig(
        dim=2,
        scaling="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=table.number("beta_fast", 32.0),
        beta_slow=table.number("beta_slow", 1.0),
        attention_factor=attention_factor,
        truncate=table.flag("truncate", True),
    )
    return Scaling(theta, partial, rope, mscale_all_dim)


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
