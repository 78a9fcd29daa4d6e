"""GGUF files: names, row order, every quantized type, and everything that must be refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFEndian, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from models_for_tests import smollm2_path
from weights.gguf_for_tests import DECODERS, permuted, random_blocks, write_tiny_gguf

from mmtp_jax.families.registry import FAMILIES
from mmtp_jax.specs import AttentionSpec, DenseSpec, LayerSpec, ModelConfig, RopeConfig
from mmtp_jax.weights.checkpoint import open_checkpoint
from mmtp_jax.weights.errors import ModelError
from mmtp_jax.weights.gguf_reader import llama3_divisors, unpermute
from mmtp_jax.weights.load import ParameterReader


def refused(path: Path, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)


# --- configuration ---


def test_llama_configuration(tmp_path: Path) -> None:
    path, _ = write_tiny_gguf(
        tmp_path / "m.gguf", keys={"tokenizer.ggml.eot_token_id": 5, "llama.vocab_size": 64}
    )
    layer = LayerSpec(AttentionSpec(4, 2, 8, rope=RopeConfig(8, 10000.0)), DenseSpec(48))
    assert open_checkpoint(path).config == ModelConfig(
        family="llama",
        vocab_size=64,
        hidden_size=32,
        layers=(layer, layer),
        max_position=512,
        norm_eps=float(np.float32(1e-5)),
        bos_token_id=1,
        eos_token_ids=(2, 5),
    )


def test_biases_follow_the_tensors(tmp_path: Path) -> None:
    qwen2, _ = write_tiny_gguf(tmp_path / "q.gguf", architecture="qwen2")
    llama, _ = write_tiny_gguf(tmp_path / "l.gguf", attention_bias=True)
    for path, output_bias in ((qwen2, False), (llama, True)):
        attention = open_checkpoint(path).config.layers[1].attention
        assert isinstance(attention, AttentionSpec)
        assert attention.qkv_bias and attention.output_bias is output_bias


def test_the_head_is_tied_when_absent(tmp_path: Path) -> None:
    for tied in (True, False):
        path, _ = write_tiny_gguf(tmp_path / "m.gguf", tie_word_embeddings=tied)
        assert open_checkpoint(path).config.tie_embeddings is tied


def test_llama3_divisors_follow_the_published_formula() -> None:
    rope = RopeConfig(
        64, 5e5, scaling="llama3", factor=32.0, low_freq_factor=1.0, original_max_position=8192
    )
    for index, divisor in enumerate(llama3_divisors(rope)):
        frequency = 5e5 ** (-2 * index / 64)
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4:
            scaled = frequency
        elif wavelength > 8192 / 1:
            scaled = frequency / 32
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            scaled = (1 - smooth) * frequency / 32 + smooth * frequency
        assert frequency / divisor == pytest.approx(scaled, rel=1e-12)


def test_llama3_scaling_is_recognised_by_its_divisors(tmp_path: Path) -> None:
    rope = RopeConfig(
        8, 5e5, scaling="llama3", factor=8.0, high_freq_factor=4.0, original_max_position=8192
    )
    divisors = llama3_divisors(rope).astype(np.float32)
    assert divisors.min() == 1.0 and divisors.max() == 8.0
    path, _ = write_tiny_gguf(
        tmp_path / "m.gguf", rope_theta=5e5, extra={"rope_freqs.weight": divisors}
    )
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.layers[0].attention.rope == rope
    assert "rope_freqs.weight" not in checkpoint.names()

    path, _ = write_tiny_gguf(
        tmp_path / "m.gguf", rope_theta=5e5, extra={"rope_freqs.weight": divisors[::-1].copy()}
    )
    refused(path, "other than that of Llama 3")


@pytest.mark.parametrize(
    ("architecture", "keys", "words"),
    [
        ("gemma2", {}, "architecture 'gemma2'"),
        ("llama", {"llama.block_count": None}, r"lacks the key llama\.block_count"),
        ("llama", {"llama.embedding_length": None}, r"lacks the key llama\.embedding_length"),
        ("llama", {"llama.nextn_predict_layers": 1}, "nextn_predict_layers: MTP modules in GGUF"),
        ("llama", {"llama.rope.scaling.type": "yarn"}, r"rope\.scaling\.type='yarn'"),
        ("llama", {"llama.expert_count": 8}, r"llama\.expert_count=8"),
        ("llama", {"llama.attention.sliding_window": 8}, r"attention\.sliding_window=8"),
        ("llama", {"llama.rope.dimension_count": 4}, r"rope\.dimension_count=4 must equal"),
        ("llama", {"llama.attention.head_count_kv": 3}, "num_kv_heads"),
        ("llama", {"llama.attention.head_count": [4, 4]}, "cannot work"),
        ("llama", {"tokenizer.ggml.eos_token_id": 64}, "eos_token_ids"),
        ("llama", {"split.count": 2}, "one part of a split"),
    ],
)
def test_what_is_not_implemented_is_named(
    tmp_path: Path, architecture: str, keys: dict[str, Any], words: str
) -> None:
    path, _ = write_tiny_gguf(tmp_path / "m.gguf", architecture=architecture, keys=keys)
    refused(path, words)


def test_keys_that_change_nothing_are_fine(tmp_path: Path) -> None:
    keys = {"llama.rope.scaling.type": "none", "llama.expert_count": 0, "general.file_type": 2}
    path, _ = write_tiny_gguf(tmp_path / "m.gguf", keys=keys)
    assert open_checkpoint(path).config.family == "llama"


def test_overrides_need_a_config_json(tmp_path: Path) -> None:
    path, _ = write_tiny_gguf(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"hf_overrides change a config\.json, which m\.gguf has"):
        open_checkpoint(path, {"rope_theta": 5.0})


# --- tensors ---


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}])
def test_tensors_under_hugging_face_names(
    tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    path, tensors = write_tiny_gguf(
        tmp_path / "m.gguf", architecture=architecture, seed=4, **changes
    )
    checkpoint = open_checkpoint(path)
    assert checkpoint.names() == {name: tensor.shape for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor, err_msg=name)


@given(heads=st.integers(1, 4), half=st.integers(1, 6), columns=st.integers(0, 2))
def test_unpermute_undoes_the_permutation(heads: int, half: int, columns: int) -> None:
    shape = (2 * heads * half, columns) if columns else (2 * heads * half,)
    rows = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    np.testing.assert_array_equal(unpermute(permuted(rows, heads), heads), rows)
    if half > 1:
        assert not np.array_equal(permuted(rows, heads), rows)


@pytest.mark.parametrize("kind", DECODERS)
def test_every_type_is_decoded(tmp_path: Path, kind: str) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    data, values = random_blocks(kind, rows=48, columns=256)
    stored: Any = data.view(np.float16) if kind == "F16" else data
    path, _ = write_tiny_gguf(
        tmp_path / "m.gguf",
        replaced={name: (stored, GGMLQuantizationType[kind])},
        hidden_size=256,
    )
    checkpoint = open_checkpoint(path)
    assert checkpoint.names()[name] == (48, 256)
    read = checkpoint.read(name)
    assert read.dtype == np.float32
    # The order of two float32 multiplications may differ.
    np.testing.assert_allclose(read, values, rtol=1e-6, atol=1e-4)


def test_quantized_queries_are_unpermuted(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    data, values = random_blocks("Q8_0", rows=32, columns=32)
    path, _ = write_tiny_gguf(
        tmp_path / "m.gguf", replaced={name: (permuted(data, 4), GGMLQuantizationType.Q8_0)}
    )
    np.testing.assert_allclose(open_checkpoint(path).read(name), values, rtol=1e-6)


def test_unsupported_types_are_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    kind = GGMLQuantizationType.IQ4_NL
    data = np.zeros((48, 18), np.uint8)
    path, _ = write_tiny_gguf(tmp_path / "m.gguf", replaced={name: (data, kind)})
    refused(path, r"blk\.1\.ffn_up\.weight as IQ4_NL")


def test_unknown_tensors_keep_their_name_and_fail_to_load(tmp_path: Path) -> None:
    path, _ = write_tiny_gguf(tmp_path / "m.gguf", extra={"blk.0.attn_sinks.weight": np.ones(4)})
    refused(path, "F64")
    ones = np.ones(4, np.float32)
    path, _ = write_tiny_gguf(tmp_path / "m.gguf", extra={"blk.0.attn_sinks.weight": ones})
    checkpoint = open_checkpoint(path)
    with pytest.raises(ModelError, match=r"does not use: blk\.0\.attn_sinks\.weight"):
        load_all(checkpoint)


def load_all(checkpoint: Any) -> dict[str, np.ndarray]:
    """Every parameter, in the shapes that the checkpoint has."""
    shapes = checkpoint.names()
    sources = FAMILIES[checkpoint.config.family].sources(checkpoint.config)
    expected = {
        path: shapes[source.names[0]][:: -1 if source.transpose else 1]
        for path, source in sources.items()
    }
    reader = ParameterReader(checkpoint, checkpoint.config, expected)
    return {path: reader.read(path, np.dtype(np.float32)) for path in expected}


# --- files ---


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, _ = write_tiny_gguf(tmp_path_factory.mktemp("whole") / "m.gguf")
    return path


@given(kept=st.floats(0.0, 1.0))
def test_every_truncation_is_found(whole: Path, kept: float) -> None:
    content = whole.read_bytes()
    # The file ends with the last tensor, padded to 32 bytes at most.
    length = min(int(kept * len(content)), len(content) - 32)
    cut = whole.with_name("cut.gguf")
    cut.write_bytes(content[:length])
    refused(cut, r"cut\.gguf is truncated or not a GGUF file")


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\3\4" * 100)
    refused(path, "magic")


def test_the_other_byte_order_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "swapped.gguf"
    writer = GGUFWriter(path, "llama", endianess=GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    refused(path, "other byte order")


def test_smollm2_loads_whole() -> None:
    checkpoint = open_checkpoint(smollm2_path())
    config = checkpoint.config
    assert (config.vocab_size, config.hidden_size, len(config.layers)) == (49152, 576, 30)
    assert (config.max_position, config.eos_token_ids, config.tie_embeddings) == (8192, (2,), True)
    attention = AttentionSpec(9, 3, 64, rope=RopeConfig(64, 100000.0))
    assert config.layers == (LayerSpec(attention, DenseSpec(1536)),) * 30
    parameters = load_all(checkpoint)
    assert sum(array.size for array in parameters.values()) == 134_515_008
    assert all(np.isfinite(array).all() for array in parameters.values())
