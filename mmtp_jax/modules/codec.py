"""Specs as JSON: exact both ways, and every value passes the checks of its class when it is read.

A spec is an object that names its class under "is". Equal neighbours in a tuple of specs are
written once, with their number.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from itertools import groupby
from typing import Any

from mmtp_jax.checks import require
from mmtp_jax.specs import (
    AttentionSpec,
    DenseSpec,
    LatentAttentionSpec,
    LayerSpec,
    LogScaling,
    ModelConfig,
    MoESpec,
    MTPConfig,
    RelativeBias,
    RopeConfig,
)

_SPECS: dict[str, type[Any]] = {
    spec.__name__: spec
    for spec in (
        AttentionSpec,
        DenseSpec,
        LatentAttentionSpec,
        LayerSpec,
        LogScaling,
        ModelConfig,
        MoESpec,
        MTPConfig,
        RelativeBias,
        RopeConfig,
    )
}
# No model has as many layers; the limit keeps a wrong number from filling the memory.
_MOST_EQUAL = 10_000


def encode(value: Any) -> Any:
    """`value`, a spec or what fields of specs hold, as JSON's types."""
    if is_dataclass(value):
        return {"is": type(value).__name__} | {
            field.name: encode(getattr(value, field.name)) for field in fields(value)
        }
    if isinstance(value, tuple) and any(map(is_dataclass, value)):
        runs = [list(run) for _, run in groupby(value)]
        return [{"count": len(run), "of": encode(run[0])} for run in runs]
    return list(value) if isinstance(value, tuple) else value


def decode(value: Any) -> Any:
    """The inverse of `encode`; ValueError (`ConfigError`), TypeError or KeyError for what is no
    spec."""
    if isinstance(value, list):
        return tuple(one for entry in value for one in _run(entry))
    if isinstance(value, dict):
        spec = _SPECS[value["is"]]
        return spec(**{name: decode(part) for name, part in value.items() if name != "is"})
    return value


def _run(entry: Any) -> tuple[Any, ...]:
    if not isinstance(entry, dict):
        return (entry,)
    count = entry["count"]
    require(
        isinstance(count, int) and 1 <= count <= _MOST_EQUAL,
        f"count must be in [1, {_MOST_EQUAL}], got {count!r}",
    )
    of = decode(entry["of"])
    return tuple(of for _ in range(count))
