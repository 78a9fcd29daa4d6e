"""What new modules are made of."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from engine.families import glm
from engine.models import GLOBAL, HIDDEN, VOCAB, chain
from oracle import Oracle

from mmtp_jax.checks import ConfigError
from mmtp_jax.models.model import ModelGraph, Params, assemble, model_graph, random_value
from mmtp_jax.specs import DenseSpec, MTPConfig
from mmtp_jax.train import fusion
from mmtp_jax.train.fusion import fitted_fusions
from mmtp_jax.train.initial import with_new_modules
from mmtp_jax.train.options import BatchOptions, NewModules
from mmtp_jax.train.shards import Dataset

DATA = Dataset(
    all_tokens=np.random.default_rng(0).integers(0, VOCAB, 600).astype(np.uint16),
    lengths=np.full(12, 50, np.int32),
    prompt_lengths=np.full(12, 5, np.int32),
    temperatures=np.zeros(12, np.float32),
    vocab_size=VOCAB,
)
BATCHES = BatchOptions(batch_tokens=256)


def made(graph: ModelGraph, params: Params, options: NewModules) -> tuple[ModelGraph, Params]:
    return with_new_modules(graph, params, options, DATA, range(len(DATA)), BATCHES)


def target(build=chain, **changes: object):  # type: ignore[no-untyped-def]
    config = build(1) if build is chain else build()
    graph = model_graph(dataclasses.replace(config, mtp=None, **changes))
    return graph, assemble(graph, random_value(graph, 5, np.dtype(np.float32)))


def test_modules_are_the_last_layer_behind_a_fitted_projection() -> None:
    graph, params = target()
    new, filled = made(graph, params, NewModules(3))
    assert new.config.mtp == MTPConfig((GLOBAL,) * 3)
    values, known = new.values(filled), graph.values(params)
    for name, value in known.items():
        np.testing.assert_array_equal(values[name], value)
    for module in ("mtp.0.", "mtp.1.", "mtp.2."):
        own = {name.removeprefix(module) for name in values if name.startswith(module)}
        copied = {name for name in own if name.startswith("layer.")}
        assert own - copied == {
            "token_norm.scale",
            "hidden_norm.scale",
            "fuse.kernel",
            "norm.scale",
        }
        for name in copied:
            of_last = known["layers.1." + name.removeprefix("layer.")]
            np.testing.assert_array_equal(values[module + name], of_last)
        np.testing.assert_array_equal(values[module + "norm.scale"], known["norm.scale"])
        np.testing.assert_array_equal(values[module + "token_norm.scale"], np.ones(HIDDEN))
    first, second, third = (values[f"mtp.{module}.fuse.kernel"] for module in range(3))
    np.testing.assert_array_equal(second, third)
    assert (first != second).any()


def test_projections_are_the_least_squares_of_what_the_last_layer_is_given() -> None:
    graph, params = target()
    found = fitted_fusions(graph, params, DATA, range(len(DATA)), BATCHES)
    oracle = Oracle(graph.config, random_value(graph, 5, np.dtype(np.float32)))
    below = dataclasses.replace(graph.config, layers=graph.config.layers[:-1])
    lower = Oracle(below, graph.values(params).__getitem__)
    embedding = np.asarray(graph.values(params)["embed.weight"], np.float64)
    scale = np.asarray(graph.values(params)["norm.scale"], np.float64)
    before: list[list[np.ndarray]] = [[], []]
    after = []
    for number in range(len(DATA)):
        tokens = DATA.tokens(number).tolist()
        raw = oracle.trace(tokens).layers[-1].output
        for place, hidden in enumerate((raw, divided(raw) * scale)):
            token = embedding[tokens[1:]]
            before[place].append(np.concatenate([divided(hidden)[:-1], divided(token)], axis=1))
        after.append(lower.trace(tokens).layers[-1].output[1:])
    for projection, inputs in zip(found, before, strict=True):
        x, y = np.concatenate(inputs), np.concatenate(after)
        best = np.linalg.lstsq(x, y, rcond=None)[0]
        error, least = (np.sum((x @ one - y) ** 2) for one in (projection, best))
        assert least <= error <= 1.001 * least
        assert error < 0.6 * np.sum(y**2)


def test_projections_are_fitted_to_the_first_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, params = target()
    short = np.full(len(DATA), 30, np.int32)
    tokens = np.concatenate([DATA.tokens(index)[:30] for index in range(len(DATA))])
    cut = dataclasses.replace(DATA, all_tokens=tokens, lengths=short)
    wanted = fitted_fusions(graph, params, cut, range(len(cut)), BATCHES)
    monkeypatch.setattr(fusion, "_LONGEST", 30)
    found = fitted_fusions(graph, params, DATA, range(len(DATA)), BATCHES)
    np.testing.assert_array_equal(found, wanted)


def divided(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + 1e-5)


def test_another_width_and_another_start() -> None:
    graph, params = target()
    new, filled = made(graph, params, NewModules(1, mlp_size=40, initial="last_layer"))
    assert new.config.mtp is not None and new.config.mtp.modules[0].mlp == DenseSpec(40)
    values, known = new.values(filled), graph.values(params)
    assert values["mtp.0.layer.mlp.gate.kernel"].shape == (HIDDEN, 40)
    np.testing.assert_array_equal(
        values["mtp.0.layer.attention.q.kernel"], known["layers.1.attention.q.kernel"]
    )
    new, filled = made(graph, params, NewModules(1, initial="random", seed=3))
    values = new.values(filled)
    assert (values["mtp.0.layer.attention.q.kernel"] != known["layers.1.attention.q.kernel"]).any()
    again = new.values(made(graph, params, NewModules(1, initial="random", seed=3))[1])
    np.testing.assert_array_equal(values["mtp.0.fuse.kernel"], again["mtp.0.fuse.kernel"])


def test_norms_that_add_one_begin_at_zero_and_experts_are_copied() -> None:
    graph, params = target(glm, norm_style="one_plus")
    new, filled = made(graph, params, NewModules(1))
    values = new.values(filled)
    np.testing.assert_array_equal(values["mtp.0.token_norm.scale"], np.zeros(HIDDEN))
    last = f"layers.{len(graph.config.layers) - 1}."
    for name, value in graph.values(params).items():
        if name.startswith(last):
            copied = values["mtp.0.layer." + name.removeprefix(last)]
            np.testing.assert_array_equal(copied, value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_modules": 0}, r"num_modules must be in \[1, 32\]"),
        ({"mlp_size": 0}, "mlp_size must be >= 1"),
        ({"initial": "zero"}, "initial must be 'fitted', 'last_layer' or 'random'"),
    ],
)
def test_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NewModules(**options)  # type: ignore[arg-type]
