"""Training: what is learnt, going on after an interruption, several devices, refused data."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.models import VOCAB, chain, random_values

from mmtp_jax.checks import ConfigError
from mmtp_jax.models.model import ModelGraph, Params, assemble, model_graph
from mmtp_jax.modules.checkpoint import open_modules
from mmtp_jax.train.fit import check_data, fit
from mmtp_jax.train.held_out import split
from mmtp_jax.train.initial import with_new_modules
from mmtp_jax.train.options import BatchOptions, FitOptions, NewModules, Objective
from mmtp_jax.train.shards import Dataset
from mmtp_jax.weights.errors import ModelError

MODULES = 2
OPTIONS = FitOptions(
    epochs=6, learning_rate=1e-2, warmup=2, held_out=6, log_every=2, save_every=4, eval_every=6
)
BATCHES = BatchOptions(batch_tokens=512)


def built() -> tuple[ModelGraph, Params]:
    config = chain(MODULES)
    target = model_graph(dataclasses.replace(config, mtp=None))
    params = assemble(target, random_values(target))
    new, data = NewModules(MODULES), dataset()
    graph, params = with_new_modules(target, params, new, data, range(20), BATCHES)
    assert graph.config == config
    return graph, params


def dataset(count: int = 60, vocab_size: int = VOCAB, longest: int = 60) -> Dataset:
    """Texts of any tokens, every second one said to be greedy."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(20, longest, count).astype(np.int32)
    return Dataset(
        all_tokens=rng.integers(0, VOCAB, int(lengths.sum())).astype(np.uint16),
        lengths=lengths,
        prompt_lengths=rng.integers(3, 12, count).astype(np.int32),
        temperatures=np.arange(count).astype(np.float32) % 2,
        vocab_size=vocab_size,
    )


def run(folder: Path, options: FitOptions = OPTIONS, **changes: Any) -> list[str]:
    """Train in a folder; what was said."""
    said: list[str] = []
    graph, params = built()
    arguments = {"data": dataset(), "say": said.append} | changes
    data = arguments["data"]
    fit(
        graph,
        params,
        data,
        split(data, options.held_out),
        folder,
        options,
        BATCHES,
        Objective(),
        {"model": "tiny"},
        arguments["say"],
    )
    return said


def log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module", params=["adamw", "muon"])
def optimizer(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def options(optimizer: str) -> FitOptions:
    return dataclasses.replace(OPTIONS, optimizer=optimizer)


@pytest.fixture(scope="module")
def trained(options: FitOptions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    run(folder, options)
    return folder


def test_modules_learn(trained: Path, optimizer: str) -> None:
    entries = log(trained)
    assert [entry["step"] for entry in entries] == list(range(2, entries[-1]["step"] + 1, 2))
    for module in range(MODULES):
        assert entries[-1]["loss"][module] < 0.9 * entries[0]["loss"][module]
    assert entries[-1]["held_out"]["tokens_per_step"] >= 1.0
    assert len(entries[-1]["held_out"]["acceptance"]) == MODULES
    modules = open_modules(trained / "modules")
    assert modules.num_speculative_tokens == MODULES
    assert modules.facts["model"] == "tiny"
    assert modules.facts["optimizer"] == optimizer
    assert modules.facts["steps"] == entries[-1]["step"]


def test_an_interrupted_training_goes_on_as_if_nothing_had_happened(
    trained: Path, options: FitOptions, tmp_path: Path
) -> None:
    class Interrupted(Exception):
        pass

    def say(text: str) -> None:
        if text.startswith("step 6/"):  # after the state of step 4 was saved
            raise Interrupted

    with pytest.raises(Interrupted):
        run(tmp_path, options, say=say)
    assert not (tmp_path / "modules").exists()
    said = run(tmp_path, options)
    assert "from step 4" in said[0]
    assert log(tmp_path) == log(trained)
    ours, theirs = open_modules(tmp_path / "modules"), open_modules(trained / "modules")
    for name in ours.names():
        np.testing.assert_array_equal(ours.read(name), theirs.read(name))
    # Once more there is nothing left to do.
    assert len(run(tmp_path, options)) == 1


def test_another_training_is_refused(trained: Path, options: FitOptions) -> None:
    other = dataclasses.replace(options, learning_rate=1e-4)
    with pytest.raises(ConfigError, match=r"other settings: learning_rate is 0\.01 there"):
        run(trained, other)
    with pytest.raises(ConfigError, match="other settings: data"):
        run(trained, data=dataset(58), options=dataclasses.replace(options, steps=10))


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    short = dataclasses.replace(OPTIONS, steps=4)
    run(tmp_path, short)
    for path in (tmp_path / "states" / "4").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(ModelError, match="the state of step 4 is damaged"):
        run(tmp_path, short)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (dataset(vocab_size=VOCAB + 1), "vocab_size of the data must be the model's 48, got 49"),
        (dataset(longest=400), "at most the model's 256 tokens"),
    ],
)
def test_refused_data(data: Dataset, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_data(chain(MODULES), data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs must be >= 1"),
        ({"steps": 0}, "steps must be >= 1"),
        ({"optimizer": "sgd"}, "optimizer must be .adamw. or .muon., got .sgd."),
        ({"learning_rate": 0.0}, "learning_rate must be > 0"),
        ({"final_rate": 2.0}, r"final_rate must be in \[0, 1\]"),
        ({"clip": 0.0}, "clip must be > 0"),
        ({"warmup": -1}, "warmup must be >= 0"),
    ],
)
def test_refused_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FitOptions(**options)


PROGRAM = """
import sys
sys.path.insert(0, "tests")
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import Mesh
from train.test_fit import built
from train.test_loss import batch
from mmtp_jax.train.options import Objective
from mmtp_jax.train.step import Batch, DATA_AXIS, TrainState, divide, train_step
graph, params = built()
optimizer = optax.sgd(1.0)
assert len(jax.devices()) == 2
one, other = batch(0), batch(1)
both = Batch(*(jnp.concatenate(pair) for pair in zip(one, other)))
def after(devices, batches):
    frozen, masters = divide(graph, params)
    step = train_step(graph, Objective(), optimizer, Mesh(np.array(devices), (DATA_AXIS,)))
    state = TrainState(jnp.int32(0), masters, optimizer.init(masters))
    return step(frozen, state, batches)
state, sums = after(jax.devices(), both)
frozen, masters = divide(graph, params)
apart = [after(jax.devices()[:1], single) for single in (one, other)]
for name in sums._fields:
    np.testing.assert_allclose(
        getattr(sums, name), sum(np.asarray(getattr(s, name)) for _, s in apart), rtol=1e-5)
for new, old, *others in zip(state.masters, masters, *(s.masters for s, _ in apart)):
    moved = np.mean([np.asarray(value) - np.asarray(old) for value in others], axis=0)
    np.testing.assert_allclose(np.asarray(new) - np.asarray(old), moved, atol=1e-6, rtol=1e-4)
print("equal")
"""


def test_two_devices_add_up_their_derivatives() -> None:
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "equal"
