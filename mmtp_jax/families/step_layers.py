"""What the configs of Step-3.5 and Step-3.7 list layer by layer, in either dialect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmtp_jax.families.blocks import layer_kinds
from mmtp_jax.families.rope import Scaling, read_scaling
from mmtp_jax.families.settings import Settings

_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class StepLayer:
    """One layer or module. `limit` clamps in routed experts, `shared_limit` in other MLPs."""

    sliding: bool
    experts: bool
    rope: Scaling
    limit: float | None
    shared_limit: float | None


def read_layers(settings: Settings, count: int, num_modules: int) -> list[StepLayer]:
    """`count` layers, then the modules. Their entries may be missing from the release's lists: they
    slide and are dense. transformers keeps their kinds in lists of their own."""
    total = count + num_modules
    sliding = _marked(settings, "layer_types", _KINDS, _KINDS[1], count, total)
    if "mlp_layer_types" in settings:
        kinds = ("dense", "sparse")
        experts = _marked(settings, "mlp_layer_types", kinds, kinds[0], count, total)
    else:
        experts = _enumerated(settings, total)
    settings.only("yarn_only_types", ["full_attention"])
    table = settings.table("rope_parameters")
    if table is not None and any(kind in table for kind in _KINDS):
        ropes = _ropes_by_kind(settings, table, sliding)
    else:
        ropes = _ropes(settings, table or settings.table("rope_scaling"), sliding, count)
    limits = _numbers(settings, "swiglu_limits", 0.0, count, total)
    shared = _numbers(settings, "swiglu_limits_shared", 0.0, count, total)
    return [
        StepLayer(slides, has_experts, rope, limit or None, shared_limit or None)
        for slides, has_experts, rope, limit, shared_limit in zip(
            sliding, experts, ropes, limits, shared, strict=True
        )
    ]


def _entries(settings: Settings, key: str, count: int) -> list[Any]:
    values: list[Any] = settings.listing(key)
    if len(values) < count:
        raise settings.error(f"{key} must have {count} entries, got {len(values)}")
    return values


def _marked(
    settings: Settings, key: str, kinds: tuple[str, str], of_module: str, count: int, total: int
) -> list[bool]:
    """Which of `total` layers and modules are of the second kind."""
    values = _entries(settings, key, count) + settings.listing(f"mtp_{key}", default=[])
    values = [*values, *[of_module] * total][:total]
    found = layer_kinds(Settings({key: values}), key, total, kinds)
    assert found is not None
    return [kind == kinds[1] for kind in found]


def _numbers(settings: Settings, key: str, usual: float, count: int, total: int) -> list[float]:
    """One number for each of `total` layers and modules; `usual` where there is none."""
    values = _entries(settings, key, count) if key in settings else []
    for value in values:
        if not isinstance(value, int | float | None) or isinstance(value, bool):
            raise settings.error(f"{key} holds {value!r}, which is no number")
    return [*(float(value or 0.0) for value in values), *[usual] * total][:total]


def _ropes_by_kind(settings: Settings, table: Settings, sliding: list[bool]) -> list[Scaling]:
    """The rotary embeddings as transformers saves them."""
    limit = settings.integer("max_position_embeddings")
    ropes = {
        kind: read_scaling(one, 10000.0, 1.0, limit)
        for kind in _KINDS
        if (one := table.table(kind)) is not None
    }
    for slides in sliding:
        if _KINDS[slides] not in ropes:
            raise table.error(f"there are {_KINDS[slides]} layers but no such rotary embedding")
    return [ropes[_KINDS[slides]] for slides in sliding]


def _ropes(
    settings: Settings, table: Settings | None, sliding: list[bool], count: int
) -> list[Scaling]:
    """The rotary embeddings in the release's dialect: only full layers' are scaled."""
    if isinstance(settings.peek("rope_theta"), list):
        thetas = _numbers(settings, "rope_theta", 10000.0, count, len(sliding))
    else:
        thetas = [settings.number("rope_theta")] * len(sliding)
    partials = _numbers(settings, "partial_rotary_factors", 1.0, count, len(sliding))
    limit = settings.integer("max_position_embeddings")
    scaling = Scaling()
    if table is not None:
        for key in ("rope_theta", "partial_rotary_factor"):
            table.only(key)  # each layer has its own
        scaling = read_scaling(table, None, None, limit)
    return [
        Scaling(theta, partial) if slides else Scaling(theta, partial, scaling.rope)
        for slides, theta, partial in zip(sliding, thetas, partials, strict=True)
    ]


def _enumerated(settings: Settings, total: int) -> list[bool]:
    """Which of `total` layers and modules have experts: "3,4,...", or a list."""
    if isinstance(settings.peek("moe_layers_enum"), list):
        found = settings.listing("moe_layers_enum", of=int)
    else:
        named = settings.text("moe_layers_enum")
        parts = [part.strip() for part in named.split(",") if part.strip()]
        if not all(part.isdecimal() for part in parts):
            raise settings.error(f"moe_layers_enum must be layers like '3,4', got {named!r}")
        found = [int(part) for part in parts]
    for index in found:
        if not 0 <= index < total:
            raise settings.error(f"moe_layers_enum must lie in [0, {total}), got {index}")
    return [index in found for index in range(total)]
