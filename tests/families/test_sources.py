"""Which numbers of which tensors end up in which parameter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from families.goldens import (
    GOLDENS,
    ROOT,
    Edited,
    golden,
    read_all,
    reader,
    rewritten,
    shapes,
    tensors_of,
)
from hypothesis import given
from hypothesis import strategies as st

from mmtp_jax.config import engine_config
from mmtp_jax.families.registry import FAMILIES
from mmtp_jax.families.tensors import Source
from mmtp_jax.loader import load_model
from mmtp_jax.weights.checkpoint import open_checkpoint

FLOAT32 = np.dtype(np.float32)
WITH_MODULES = [name for name in GOLDENS if golden(name).config.mtp is not None]
sizes = st.integers(1, 4)


def value(source: Source, shape: tuple[int, ...], tensors: dict[str, np.ndarray]) -> np.ndarray:
    """A parameter from tensors of the shape that its source expects."""
    for tensor in tensors.values():
        assert source.stored_shape(shape) == tensor.shape
    return source.value(tensors.__getitem__, shape, FLOAT32)


def numbered(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


# --- one source ---


@given(inputs=sizes, outputs=sizes)
def test_linear_layers_are_transposed(inputs: int, outputs: int) -> None:
    stored = numbered(outputs, inputs)
    got = value(Source(("a",), transpose=True), (inputs, outputs), {"a": stored})
    for row in range(inputs):
        for column in range(outputs):
            assert got[row, column] == stored[column, row]


@given(experts=sizes, inputs=sizes, outputs=sizes)
def test_one_tensor_for_each_expert(experts: int, inputs: int, outputs: int) -> None:
    names = tuple(f"experts.{index}" for index in range(experts))
    stored = {name: numbered(outputs, inputs) + 100 * i for i, name in enumerate(names)}
    got = value(Source(names, stacked=True, transpose=True), (experts, inputs, outputs), stored)
    for expert, name in enumerate(names):
        for row in range(inputs):
            for column in range(outputs):
                assert got[expert, row, column] == stored[name][column, row]


@given(experts=sizes, inputs=sizes, outputs=sizes, stack=st.booleans())
def test_gate_and_up_alternate_by_rows(
    experts: int, inputs: int, outputs: int, stack: bool
) -> None:
    """Inkling: even rows are the gate's, odd ones the up projection's."""
    lead = (experts,) if stack else ()
    stored = numbered(*lead, 2 * outputs, inputs)
    for part, start in (("gate", 0), ("up", 1)):
        source = Source((part,), transpose=True, rows=start)
        got = value(source, (*lead, inputs, outputs), {part: stored})
        for row in range(inputs):
            for column in range(outputs):
                want = stored[..., 2 * column + start, row]
                np.testing.assert_array_equal(got[..., row, column], want)


@given(channels=sizes, taps=sizes)
def test_taps_of_a_depthwise_convolution(channels: int, taps: int) -> None:
    stored = numbered(channels, 1, taps)
    got = value(Source(("a",), taps=True), (taps, channels), {"a": stored})
    for tap in range(taps):
        for channel in range(channels):
            assert got[tap, channel] == stored[channel, 0, tap]


# --- the parameters of every family ---


@pytest.mark.parametrize("name", GOLDENS)
def test_every_parameter_has_a_source(name: str) -> None:
    config = golden(name).config
    assert FAMILIES[config.family].sources(config).keys() == shapes(config).keys()


@pytest.mark.parametrize(
    ("name", "path", "tensor"),
    [
        ("deepseek_v3", "mtp.0.token_norm.scale", "model.layers.3.enorm.weight"),
        ("deepseek_v3", "mtp.0.hidden_norm.scale", "model.layers.3.hnorm.weight"),
        ("deepseek_v3", "mtp.2.norm.scale", "model.layers.5.shared_head.norm.weight"),
        (
            "deepseek_v3",
            "layers.0.attention.q_norm.scale",
            "model.layers.0.self_attn.q_a_layernorm.weight",
        ),
        (
            "deepseek_v3",
            "layers.0.attention.kv_norm.scale",
            "model.layers.0.self_attn.kv_a_layernorm.weight",
        ),
        (
            "deepseek_v3",
            "layers.1.mlp.router.bias",
            "model.layers.1.mlp.gate.e_score_correction_bias",
        ),
        ("glm4_moe", "layers.0.attention.k_norm.scale", "model.layers.0.self_attn.k_norm.weight"),
        ("glm4_moe", "mtp.1.layer.attention.q.bias", "model.layers.4.self_attn.q_proj.bias"),
        ("mimo", "mtp.0.token_norm.scale", "model.mtp_layers.0.token_layernorm.weight"),
        ("mimo", "mtp.0.hidden_norm.scale", "model.mtp_layers.0.hidden_layernorm.weight"),
        (
            "mimo_v2_flash",
            "mtp.2.layer.mlp_norm.scale",
            "model.mtp.layers.2.pre_mlp_layernorm.weight",
        ),
        (
            "mimo_v2_flash",
            "layers.1.attention.sinks",
            "model.layers.1.self_attn.attention_sink_bias",
        ),
        ("step3p5", "layers.2.mlp.router.bias", "model.layers.2.moe.router_bias"),
        ("step3p5", "mtp.0.norm.scale", "model.layers.5.transformer.shared_head.norm.weight"),
        ("inkling", "embed_norm.scale", "model.llm.embed_norm.weight"),
        ("inkling", "mtp.1.token_norm.scale", "model.mtp.layers.1.embed_norm.weight"),
        ("inkling", "mtp.1.hidden_norm.scale", "model.mtp.layers.1.hidden_norm.weight"),
        (
            "inkling",
            "layers.5.attention.relative.table",
            "model.llm.layers.5.attn.rel_logits_proj.proj",
        ),
        ("inkling", "layers.2.mlp.router.scale", "model.llm.layers.2.mlp.gate.global_scale"),
        ("inkling", "layers.0.mlp.scale", "model.llm.layers.0.mlp.global_scale"),
        ("inkling_chain_norm", "mtp.norm.scale", "model.mtp.chain_norm.weight"),
        ("llama_tied", "embed.weight", "model.embed_tokens.weight"),
    ],
)
def test_plain_tensors(name: str, path: str, tensor: str) -> None:
    np.testing.assert_array_equal(read_all(golden(name))[path], tensors_of(name)[tensor])


@pytest.mark.parametrize(
    ("name", "path", "tensor"),
    [
        ("deepseek_v3", "layers.2.attention.kv_up", "model.layers.2.self_attn.kv_b_proj.weight"),
        ("deepseek_v3", "layers.2.mlp.router.kernel", "model.layers.2.mlp.gate.weight"),
        (
            "deepseek_v3",
            "mtp.1.layer.mlp.shared.down.kernel",
            "model.layers.4.mlp.shared_experts.down_proj.weight",
        ),
        ("glm4_moe", "mtp.0.fuse.kernel", "model.layers.3.eh_proj.weight"),
        ("mimo_v2_flash", "mtp.1.fuse.kernel", "model.mtp.layers.1.eh_proj.weight"),
        ("step3p5", "layers.1.attention.gate.kernel", "model.layers.1.self_attn.g_proj.weight"),
        ("step3p5", "layers.4.mlp.experts.down", "model.layers.4.moe.down_proj.weight"),
        ("step3p5", "layers.4.mlp.shared.up.kernel", "model.layers.4.share_expert.up_proj.weight"),
        ("step3p5", "mtp.2.head.kernel", "model.layers.7.transformer.shared_head.output.weight"),
        (
            "inkling",
            "layers.0.attention.relative.rows.kernel",
            "model.llm.layers.0.attn.wr_du.weight",
        ),
        ("inkling", "head.kernel", "model.llm.unembed.weight"),
        ("inkling", "mtp.3.fuse.kernel", "model.mtp.layers.3.input_proj.weight"),
        (
            "inkling",
            "layers.3.mlp.sinks.down",
            "model.llm.layers.3.mlp.shared_experts.shared_w2_weight",
        ),
    ],
)
def test_transposed_tensors(name: str, path: str, tensor: str) -> None:
    want = tensors_of(name)[tensor].swapaxes(-1, -2)
    np.testing.assert_array_equal(read_all(golden(name))[path], want)


def test_experts_of_inkling() -> None:
    values, stored = read_all(golden("inkling")), tensors_of("inkling")
    for path, tensor in (
        ("layers.2.mlp.experts", "model.llm.layers.2.mlp.experts.w13_weight"),
        ("layers.2.mlp.sinks", "model.llm.layers.2.mlp.shared_experts.shared_w13_weight"),
    ):
        for expert, rows in enumerate(stored[tensor]):
            np.testing.assert_array_equal(values[f"{path}.gate"][expert].T, rows[0::2])
            np.testing.assert_array_equal(values[f"{path}.up"][expert].T, rows[1::2])
    rows = stored["model.mtp.layers.1.transformer_block.mlp.w13_dn.weight"]
    np.testing.assert_array_equal(values["mtp.1.layer.mlp.gate.kernel"].T, rows[0::2])
    np.testing.assert_array_equal(values["mtp.1.layer.mlp.up.kernel"].T, rows[1::2])


def test_convolutions_of_inkling() -> None:
    values, stored = read_all(golden("inkling")), tensors_of("inkling")
    for path, tensor in (
        ("layers.4.attention.k_conv", "model.llm.layers.4.attn.k_sconv"),
        ("layers.4.attention.v_conv", "model.llm.layers.4.attn.v_sconv"),
        ("layers.4.attention_conv", "model.llm.layers.4.attn_sconv"),
        ("mtp.2.layer.mlp_conv", "model.mtp.layers.2.transformer_block.mlp_sconv"),
    ):
        taps = stored[f"{tensor}.weight"]
        np.testing.assert_array_equal(values[f"{path}.taps"], taps[:, 0, :].T)


def test_experts_of_deepseek_v3() -> None:
    values, stored = read_all(golden("deepseek_v3")), tensors_of("deepseek_v3")
    for part in ("gate", "up", "down"):
        for path, name in (("layers.1", "model.layers.1"), ("mtp.2.layer", "model.layers.5")):
            for expert, kernel in enumerate(values[f"{path}.mlp.experts.{part}"]):
                tensor = stored[f"{name}.mlp.experts.{expert}.{part}_proj.weight"]
                np.testing.assert_array_equal(kernel, tensor.T)


# --- how they are stored ---


@pytest.mark.parametrize("name", GOLDENS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_stored_in_half_precision(name: str, dtype: Any, tmp_path: Path) -> None:
    half = {tensor: array.astype(dtype) for tensor, array in tensors_of(name).items()}
    rewritten(name, tmp_path, {"model.safetensors": half}, index=False)
    exact = read_all(golden(name))
    for path, array in read_all(open_checkpoint(tmp_path)).items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, exact[path].astype(dtype).astype(np.float32))


@pytest.mark.parametrize("name", ["inkling", "deepseek_v3", "step3p5", "llama"])
@pytest.mark.parametrize("index", [True, False])
def test_spread_over_files(name: str, index: bool, tmp_path: Path) -> None:
    tensors = tensors_of(name)
    parts: dict[str, dict[str, np.ndarray]] = {f"part-{i}.safetensors": {} for i in range(3)}
    for number, (tensor, array) in enumerate(tensors.items()):
        parts[f"part-{number % 3}.safetensors"][tensor] = array
    rewritten(name, tmp_path, parts, index=index)
    exact = read_all(golden(name))
    for path, array in read_all(open_checkpoint(tmp_path)).items():
        np.testing.assert_array_equal(array, exact[path])


@pytest.mark.parametrize("name", GOLDENS)
def test_positions_go_through_the_files_one_after_the_other(name: str) -> None:
    checkpoint = Edited(golden(name))
    found = reader(checkpoint)
    config = golden(name).config
    sources = FAMILIES[config.family].sources(config)
    order = sorted(sources, key=found.position)
    firsts = [sources[path].names[0] for path in order]
    stored = list(golden(name).names())
    assert firsts == sorted(firsts, key=stored.index)


@pytest.mark.parametrize("name", WITH_MODULES)
def test_modules_beyond_the_ones_in_use_are_never_read(name: str) -> None:
    shipped = golden(name).config
    assert shipped.mtp is not None
    sources = FAMILIES[shipped.family].sources(shipped)
    copies = FAMILIES[shipped.family].copies(shipped)
    for kept in range(shipped.num_modules):
        config = replace(shipped, mtp=shipped.mtp.drafting(kept) if kept else None)
        checkpoint = Edited(golden(name))
        values = read_all(checkpoint, config)
        assert values.keys() == shapes(config).keys()
        unused = {
            tensor
            for path, source in sources.items()
            if path not in values
            for tensor in source.names
        }
        unused |= copies.keys() - FAMILIES[shipped.family].copies(config).keys()
        assert unused and not unused & set(checkpoint.read_names)
        everything = read_all(golden(name))
        for path, array in values.items():
            np.testing.assert_array_equal(array, everything[path])


# --- in the model ---

KEPT_FLOAT32 = {
    "deepseek_v3": {"router.kernel", "router.bias"},
    "glm4_moe": {"router.kernel", "router.bias"},
    "mimo_v2_flash": {"router.kernel", "router.bias"},
    "step3p5": {"router.kernel", "router.bias"},
    "inkling": {"router.kernel", "router.bias"},
    "mimo": set(),
}


@pytest.mark.parametrize("name", KEPT_FLOAT32)
def test_routers_stay_float32_in_a_bfloat16_model(name: str) -> None:
    """Selection depends on small differences of scores and correction biases."""
    config = engine_config(str(ROOT / name), None, dtype="bfloat16", num_pages=64, page_size=4)
    loaded = load_model(config)
    exact = read_all(golden(name))
    wide = set()
    for leaf, param in zip(loaded.graph.leaves(), loaded.params, strict=True):
        assert isinstance(param, jax.Array)
        array = np.asarray(param)
        for piece in leaf.pieces:
            got = array[piece.place].reshape(piece.shape)
            np.testing.assert_array_equal(got, exact[piece.name].astype(param.dtype))
        if param.dtype == np.float32:
            wide |= {".".join(path.split(".")[-2:]) for path in leaf.names}
        else:
            assert param.dtype == ml_dtypes.bfloat16
    assert wide == KEPT_FLOAT32[name]
