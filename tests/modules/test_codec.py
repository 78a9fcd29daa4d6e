"""Specs become JSON and the same specs again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmtp_jax.modules.codec import decode, encode
from mmtp_jax.specs import AttentionSpec, DenseSpec, LayerSpec, MTPConfig, RopeConfig
from mmtp_jax.weights.checkpoint import open_checkpoint

GOLDENS = Path(__file__).parents[1] / "parity" / "goldens"
LAYER = LayerSpec(AttentionSpec(2, 1, 4, rope=RopeConfig(4)), DenseSpec(8))


@pytest.mark.parametrize("family", [path.name for path in sorted(GOLDENS.iterdir())])
def test_models_of_every_family(family: str) -> None:
    model = open_checkpoint(GOLDENS / family, with_weights=False).config
    assert decode(json.loads(json.dumps(encode(model)))) == model


def test_equal_neighbours_are_written_once() -> None:
    other = LayerSpec(LAYER.attention, DenseSpec(9))
    mtp = MTPConfig((LAYER, LAYER, other, LAYER))
    encoded = encode(mtp)
    assert [run["count"] for run in encoded["modules"]] == [2, 1, 1]
    assert decode(json.loads(json.dumps(encoded))) == mtp


@pytest.mark.parametrize(
    "change",
    [
        {"is": "EngineConfig"},
        {"frobnicate": 3},
        {"concat": "sideways"},
        {"modules": []},
        {"modules": [{"count": 0, "of": encode(LAYER)}]},
        {"modules": [{"count": 1e9, "of": encode(LAYER)}]},
        {"modules": [{"of": encode(LAYER)}]},
        {"modules": [3]},
    ],
)
def test_what_is_no_spec_is_refused(change: dict) -> None:
    encoded = encode(MTPConfig((LAYER,)))
    with pytest.raises((ValueError, TypeError, KeyError)):
        decode(encoded | change)
    with pytest.raises(KeyError):
        decode({"modules": []})
