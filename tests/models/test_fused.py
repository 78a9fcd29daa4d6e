"""Joined projections: the names and shapes outside, and products equal to separate ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

from mmtp_jax.models.attention import Attention
from mmtp_jax.models.experts import Experts
from mmtp_jax.models.mlp import GatedMLP
from mmtp_jax.models.model import Model, ModelGraph, assemble, model_graph, random_value
from mmtp_jax.models.mtp import MTPModule
from mmtp_jax.models.sharding import TENSOR_AXIS, split
from mmtp_jax.specs import AttentionSpec, DenseSpec, LayerSpec, ModelConfig, MoESpec, MTPConfig

HIDDEN, HEADS, KV_HEADS, DIM, VALUE_DIM, SIZE, EXPERTS = 16, 6, 2, 4, 8, 24, 5
ATTENTION = AttentionSpec(HEADS, KV_HEADS, DIM, value_dim=VALUE_DIM, qkv_bias=True)
DENSE = LayerSpec(ATTENTION, DenseSpec(SIZE))
MIXTURE = LayerSpec(ATTENTION, MoESpec(EXPERTS, 2, SIZE, num_sinks=2, shared=DenseSpec(SIZE)))
CONFIG = ModelConfig("test", 32, HIDDEN, (DENSE, MIXTURE), 64, mtp=MTPConfig((DENSE,) * 3))

PROJECTIONS = {
    "attention.q.kernel": (HIDDEN, HEADS * DIM),
    "attention.k.kernel": (HIDDEN, KV_HEADS * DIM),
    "attention.v.kernel": (HIDDEN, KV_HEADS * VALUE_DIM),
    "attention.q.bias": (HEADS * DIM,),
    "attention.k.bias": (KV_HEADS * DIM,),
    "attention.v.bias": (KV_HEADS * VALUE_DIM,),
}
MLP = {"gate.kernel": (HIDDEN, SIZE), "up.kernel": (HIDDEN, SIZE), "down.kernel": (SIZE, HIDDEN)}


def on_host(graph: ModelGraph) -> Callable[[str], np.ndarray]:
    """Random values in the host's memory."""
    random = random_value(graph, 0, np.dtype(np.float32))
    return lambda name: np.asarray(random(name))


@pytest.fixture(scope="module")
def graph() -> ModelGraph:
    return model_graph(CONFIG)


@pytest.fixture(scope="module")
def model(graph: ModelGraph) -> Model:
    return graph.bind(assemble(graph, on_host(graph)))


@pytest.fixture(scope="module")
def values(graph: ModelGraph) -> dict[str, np.ndarray]:
    value = on_host(graph)
    return {name: value(name) for name in graph.shapes()}


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((7, HIDDEN)).astype(np.float32)


def module(stack: MTPModule, depth: int) -> MTPModule:
    """One of the stacked modules."""
    graph, params = nnx.split(stack)
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf[depth], params))


def test_names_and_shapes_outside(graph: ModelGraph) -> None:
    shapes = graph.shapes()
    for path in ("layers.0", "layers.1", "mtp.0.layer", "mtp.2.layer"):
        for name, shape in PROJECTIONS.items():
            assert shapes[f"{path}.{name}"] == shape
    for path in ("layers.0.mlp", "layers.1.mlp.shared", "mtp.0.layer.mlp", "mtp.2.layer.mlp"):
        for name, shape in MLP.items():
            assert shapes[f"{path}.{name}"] == shape
    for part, count in (("experts", EXPERTS), ("sinks", 2)):
        for name in ("gate", "up"):
            assert shapes[f"layers.1.mlp.{part}.{name}"] == (count, HIDDEN, SIZE)
    assert not [name for name in shapes if "qkv" in name or "gate_up" in name]
    total = sum(leaf.num_values for leaf in graph.leaves())
    assert total == sum(math.prod(shape) for shape in shapes.values())


def test_stacked_and_joined_arrays_are_few(graph: ModelGraph) -> None:
    kernels = [leaf for leaf in graph.leaves() if leaf.names[0] == "mtp.0.layer.attention.q.kernel"]
    assert [leaf.names for leaf in kernels] == [
        tuple(f"mtp.{m}.layer.attention.{part}.kernel" for m in range(3) for part in "qkv")
    ]
    columns = HEADS // KV_HEADS * DIM + DIM + VALUE_DIM
    assert kernels[0].shape == (3, HIDDEN, KV_HEADS, columns)
    assert kernels[0].axes == (None, "hidden", "kv_heads", "head_columns")


@pytest.mark.parametrize("path", ["layers.1", "mtp.0.layer", "mtp.2.layer"])
def test_attention_projections(
    path: str, model: Model, values: dict[str, np.ndarray], rows: np.ndarray
) -> None:
    part, number, *_ = path.split(".")
    if part == "layers":
        attention = model.target.layers[int(number)].attention
    else:
        attention = module(model.mtp.runs[0], int(number)).layer.attention
    assert isinstance(attention, Attention)
    joined = attention.qkv(jnp.asarray(rows))
    queries = HEADS // KV_HEADS * DIM
    parts = np.split(np.asarray(joined), [queries, queries + DIM], axis=-1)
    for name, got in zip("qkv", parts, strict=True):
        kernel, bias = (values[f"{path}.attention.{name}.{part}"] for part in ("kernel", "bias"))
        np.testing.assert_allclose(got.reshape(7, -1), rows @ kernel + bias, atol=1e-5)


@pytest.mark.parametrize("path", ["layers.0.mlp", "layers.1.mlp.shared", "mtp.1.layer.mlp"])
def test_mlp_projections(
    path: str, model: Model, values: dict[str, np.ndarray], rows: np.ndarray
) -> None:
    mlp = {
        "layers.0.mlp": lambda: model.target.layers[0].mlp,
        "layers.1.mlp.shared": lambda: model.target.layers[1].mlp.shared,
        "mtp.1.layer.mlp": lambda: module(model.mtp.runs[0], 1).layer.mlp,
    }[path]()
    assert isinstance(mlp, GatedMLP)
    joined = np.asarray(mlp.gate_up(jnp.asarray(rows)))
    for index, name in enumerate(("gate", "up")):
        want = rows @ values[f"{path}.{name}.kernel"]
        np.testing.assert_allclose(joined[:, index], want, atol=1e-5)


@pytest.mark.parametrize("part", ["experts", "sinks"])
def test_expert_projections(part: str, model: Model, values: dict[str, np.ndarray]) -> None:
    experts = getattr(model.target.layers[1].mlp, part)
    assert isinstance(experts, Experts)
    for index, name in enumerate(("gate", "up")):
        want = values[f"layers.1.mlp.{part}.{name}"]
        np.testing.assert_array_equal(experts.gate_up[...][:, :, index], want)


def test_arrays_of_the_device_are_joined_as_those_of_the_host(graph: ModelGraph) -> None:
    device = assemble(graph, random_value(graph, 0, np.dtype(np.float32)))
    for leaf, one, other in zip(
        graph.leaves(), device, assemble(graph, on_host(graph)), strict=True
    ):
        assert one.shape == leaf.shape
        np.testing.assert_array_equal(one, other)
        for piece in leaf.pieces:
            assert one[piece.place].size == math.prod(piece.shape)


def test_one_array_at_a_time_is_read(graph: ModelGraph) -> None:
    """A leaf's parameters are asked for one after the other, the first names in order."""
    asked: list[str] = []
    value = on_host(graph)

    def asking(name: str) -> np.ndarray:
        asked.append(name)
        return value(name)

    leaves = {leaf.names[0]: leaf.names for leaf in graph.leaves()}
    order = {name: -index for index, name in enumerate(leaves)}
    assemble(graph, asking, order=order.__getitem__)
    assert asked == [name for first in reversed(leaves) for name in leaves[first]]


def test_random_values_have_their_distribution_and_dtype(graph: ModelGraph) -> None:
    bfloat16 = jnp.dtype("bfloat16")
    value, other = random_value(graph, 3, bfloat16), random_value(graph, 4, bfloat16)
    kernel = value("layers.0.mlp.gate.kernel")
    assert kernel.dtype == bfloat16 and kernel.shape == (HIDDEN, SIZE)
    wide = np.asarray(kernel, np.float32)
    assert abs(wide.mean()) < 0.05 and abs(wide.std() * HIDDEN**0.5 - 1) < 0.15
    assert value("layers.1.mlp.router.kernel").dtype == np.float32
    norms = np.concatenate([value(f"layers.{i}.mlp_norm.scale") for i in range(2)])
    assert abs(norms.astype(np.float32).mean() - 1) < 0.1
    for different in (value("layers.0.mlp.up.kernel"), other("layers.0.mlp.gate.kernel")):
        assert not np.array_equal(kernel, different)
    np.testing.assert_array_equal(kernel, value("layers.0.mlp.gate.kernel"))


@pytest.mark.parametrize(("devices", "heads"), [(2, TENSOR_AXIS), (3, None), (4, None)])
def test_devices_share_whole_key_heads_and_parts_of_both_gate_and_up(
    graph: ModelGraph, devices: int, heads: str | None
) -> None:
    """Of 2 key heads (devices may be too many), and of an inner dimension of 24; 5 experts
    are nobody's share."""
    mesh = AbstractMesh((devices,), (TENSOR_AXIS,))
    spec = {leaf.names[0]: split(mesh, leaf.axes, leaf.shape).spec for leaf in graph.leaves()}
    assert spec["layers.0.attention.q.kernel"] == PartitionSpec(None, heads, None)
    assert spec["mtp.0.layer.attention.q.bias"] == PartitionSpec(None, heads, None)
    assert spec["layers.0.mlp.gate.kernel"] == PartitionSpec(None, None, TENSOR_AXIS)
    assert spec["mtp.0.layer.mlp.gate.kernel"] == PartitionSpec(None, None, None, TENSOR_AXIS)
    assert spec["layers.1.mlp.experts.gate"] == PartitionSpec(None, None, None, None)
