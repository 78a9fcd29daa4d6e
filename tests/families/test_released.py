"""The configs of the released models, read into the specs that their papers and cards describe."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from families.goldens import GOLDENS, ROOT, golden_config
from families.released import (
    DEEPSEEK_V3,
    GLM_4_5,
    GLM_4_5_AIR,
    INKLING,
    INKLING_SMALL,
    LLAMA_3_1_8B,
    LLAMA_3_2_1B,
    MIMO_7B,
    MIMO_V2_FLASH,
    QWEN2_5_0_5B,
    QWEN2_5_7B,
    QWEN3_0_6B,
    QWEN3_8B,
    RELEASED,
    SMOLLM2_135M,
    STEP_3_5_FLASH,
)

from mmtp_jax.families.registry import parse_config
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
from mmtp_jax.weights.errors import ModelError


def parsed(config: dict[str, Any], **generation: Any) -> ModelConfig:
    return parse_config(config, generation)


def llama3(dim: int, theta: float, factor: float) -> RopeConfig:
    return RopeConfig(
        dim,
        theta,
        scaling="llama3",
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=8192,
    )


# --- dense families ---


def test_llama_3_1_8b() -> None:
    attention = AttentionSpec(32, 8, 128, rope=llama3(128, 5e5, 8.0))
    assert parsed(LLAMA_3_1_8B) == ModelConfig(
        "llama",
        128256,
        4096,
        (LayerSpec(attention, DenseSpec(14336)),) * 32,
        131072,
        norm_eps=1e-5,
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
    )


def test_llama_3_2_1b() -> None:
    attention = AttentionSpec(32, 8, 64, rope=llama3(64, 5e5, 32.0))
    config = parsed(LLAMA_3_2_1B, bos_token_id=128000, eos_token_id=[128001, 128008, 128009])
    assert config == ModelConfig(
        "llama",
        128256,
        2048,
        (LayerSpec(attention, DenseSpec(8192)),) * 16,
        131072,
        norm_eps=1e-5,
        tie_embeddings=True,
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
    )


def test_smollm2_135m() -> None:
    attention = AttentionSpec(9, 3, 64, rope=RopeConfig(64, 1e5))
    config = parsed(SMOLLM2_135M)
    assert config.layers == (LayerSpec(attention, DenseSpec(1536)),) * 30
    assert (config.tie_embeddings, config.norm_eps, config.max_position) == (True, 1e-5, 8192)


@pytest.mark.parametrize(
    ("released", "attention", "mlp", "layers", "tied", "vocab_size"),
    [
        (
            QWEN2_5_0_5B,
            AttentionSpec(14, 2, 64, rope=RopeConfig(64, 1e6), qkv_bias=True),
            4864,
            24,
            True,
            151936,
        ),
        (
            QWEN2_5_7B,
            AttentionSpec(28, 4, 128, rope=RopeConfig(128, 1e6), qkv_bias=True),
            18944,
            28,
            False,
            152064,
        ),
        (
            QWEN3_0_6B,
            AttentionSpec(16, 8, 128, rope=RopeConfig(128, 1e6), qk_norm=True),
            3072,
            28,
            True,
            151936,
        ),
        (
            QWEN3_8B,
            AttentionSpec(32, 8, 128, rope=RopeConfig(128, 1e6), qk_norm=True),
            12288,
            36,
            False,
            151936,
        ),
    ],
)
def test_qwen(
    released: dict[str, Any],
    attention: AttentionSpec,
    mlp: int,
    layers: int,
    tied: bool,
    vocab_size: int,
) -> None:
    """No layer slides although some configs name a window: use_sliding_window is false."""
    config = parsed(released)
    assert config.layers == (LayerSpec(attention, DenseSpec(mlp)),) * layers
    assert (config.tie_embeddings, config.vocab_size, config.mtp) == (tied, vocab_size, None)
    assert (config.norm_eps, config.eos_token_ids) == (1e-6, (151645,))


def test_qwen3_heads_have_128_entries_by_default() -> None:
    config = parsed({key: value for key, value in QWEN3_0_6B.items() if key != "head_dim"})
    assert config == parsed(QWEN3_0_6B)


def test_yarn_as_qwen_cards_recommend_it() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    (rope,) = {
        layer.attention.rope for layer in parsed(QWEN2_5_7B | {"rope_scaling": scaling}).layers
    }
    assert rope == RopeConfig(
        128,
        1e6,
        scaling="yarn",
        factor=4.0,
        original_max_position=32768,
        attention_factor=0.1 * math.log(4) + 1,
    )


def test_mimo_7b() -> None:
    attention = AttentionSpec(32, 8, 128, rope=RopeConfig(128, 640000.0), qkv_bias=True)
    layer = LayerSpec(attention, DenseSpec(11008))
    config = parsed(MIMO_7B)
    assert config.layers == (layer,) * 36
    assert (config.hidden_size, config.vocab_size, config.norm_eps) == (4096, 151680, 1e-5)
    assert config.mtp == MTPConfig(
        (layer,),
        concat="hidden_first",
        target_hidden="pre",
        feed="chain_post",
        norm="own",
        zero_first_embedding=True,
    )


# --- mixtures ---


def test_mimo_v2_flash() -> None:
    def attention(kv_heads: int, theta: float, **options: Any) -> AttentionSpec:
        rope = RopeConfig(64, theta)  # int(192 * 0.334)
        return AttentionSpec(
            64, kv_heads, 192, rope=rope, value_dim=128, value_scale=0.707, **options
        )

    # SGLang and transformers count the window besides the query itself.
    sliding = attention(8, 1e4, window=129, sinks=True)
    full = attention(4, 5e6)
    experts = MoESpec(256, 8, 2048)
    config = parsed(MIMO_V2_FLASH)
    assert {index for index, layer in enumerate(config.layers) if layer.attention == full} == {
        0,
        *range(5, 48, 6),
    }
    assert sum(layer.attention == sliding for layer in config.layers) == 39
    assert [layer.mlp for layer in config.layers] == [DenseSpec(16384)] + [experts] * 47
    assert (config.vocab_size, config.norm_eps, config.max_position) == (152576, 1e-5, 262144)
    assert config.mtp == MTPConfig(
        (LayerSpec(sliding, DenseSpec(16384)),) * 3,
        concat="embed_first",
        target_hidden="post",
        feed="target",
        norm="own",
        zero_first_embedding=False,
    )


def test_the_modules_of_mimo_v2_flash_are_counted_by_their_tensors() -> None:
    names = [f"model.mtp.layers.{index}.enorm.weight" for index in range(2)]
    for found, count in ((names, 2), ([], 0)):
        config = parse_config(MIMO_V2_FLASH, {}, [*found, "model.norm.weight"])
        assert config.num_modules == count
    declared = MIMO_V2_FLASH | {"num_nextn_predict_layers": 3}
    assert parse_config(declared, {}, names).num_modules == 3


def test_step_3_5_flash() -> None:
    full = AttentionSpec(
        64,
        8,
        128,
        rope=RopeConfig(
            64,
            5e6,
            scaling="llama3",
            factor=2.0,
            low_freq_factor=1.0,
            high_freq_factor=32.0,
            original_max_position=131072,
        ),
        qk_norm=True,
        head_gate=True,
    )
    sliding = AttentionSpec(
        96, 8, 128, rope=RopeConfig(128, 1e4), window=512, qk_norm=True, head_gate=True
    )
    experts = MoESpec(288, 8, 1280, scale=3.0, shared=DenseSpec(1280))
    clamped = replace(experts, limit=7.0, shared=DenseSpec(1280, limit=16.0))
    config = parsed(STEP_3_5_FLASH)
    assert [layer.attention for layer in config.layers] == [
        sliding if index % 4 else full for index in range(45)
    ]
    mlps: list[Any] = [DenseSpec(11264)] * 3 + [experts] * 40 + [clamped] * 2
    assert [layer.mlp for layer in config.layers] == mlps
    assert (config.vocab_size, config.norm_eps, config.norm_style) == (128896, 1e-5, "one_plus")
    assert (config.bos_token_id, config.eos_token_ids) == (0, (1, 2, 128007))
    assert config.mtp == MTPConfig(
        (LayerSpec(sliding, DenseSpec(11264)),) * 3,
        concat="embed_first",
        target_hidden="pre",
        feed="chain_pre",
        norm="own",
        own_head=True,
        zero_first_embedding=False,
    )


def test_lists_of_step_3_5_flash_may_leave_the_modules_out() -> None:
    lists = [key for key, value in STEP_3_5_FLASH.items() if value and isinstance(value, list)]
    short = {key: STEP_3_5_FLASH[key][:45] for key in lists if len(STEP_3_5_FLASH[key]) == 48}
    assert len(short) == 5
    assert parsed(STEP_3_5_FLASH | short) == parsed(STEP_3_5_FLASH)
    as_list = STEP_3_5_FLASH | {"moe_layers_enum": list(range(3, 45))}
    assert parsed(as_list) == parsed(STEP_3_5_FLASH)


def test_deepseek_v3() -> None:
    mscale = 0.1 * math.log(40) + 1
    attention = LatentAttentionSpec(
        num_heads=128,
        latent_rank=512,
        nope_dim=128,
        value_dim=128,
        rope=RopeConfig(
            64,
            1e4,
            interleaved=True,
            scaling="yarn",
            factor=40.0,
            original_max_position=4096,
            beta_fast=32.0,
            beta_slow=1.0,
            attention_factor=1.0,
        ),
        scale=192**-0.5 * mscale**2,
        query_rank=1536,
    )
    experts = MoESpec(256, 8, 2048, num_groups=8, top_groups=4, scale=2.5, shared=DenseSpec(2048))
    dense, mixture = LayerSpec(attention, DenseSpec(18432)), LayerSpec(attention, experts)
    config = parsed(DEEPSEEK_V3)
    assert config.layers == (dense,) * 3 + (mixture,) * 58
    assert (config.vocab_size, config.norm_eps, config.max_position) == (129280, 1e-6, 163840)
    assert config.mtp == MTPConfig(
        (mixture,),
        concat="embed_first",
        target_hidden="post",
        feed="chain_post",
        norm="own",
        zero_first_embedding=False,
    )


@pytest.mark.parametrize(
    ("released", "hidden", "experts", "dense", "first", "layers", "qk_norm"),
    [
        (GLM_4_5, 5120, (160, 1536, 2.5), 12288, 3, 92, True),
        (GLM_4_5_AIR, 4096, (128, 1408, 1.0), 10944, 1, 46, False),
    ],
)
def test_glm_4_5(
    released: dict[str, Any],
    hidden: int,
    experts: tuple[int, int, float],
    dense: int,
    first: int,
    layers: int,
    qk_norm: bool,
) -> None:
    attention = AttentionSpec(96, 8, 128, rope=RopeConfig(64, 1e6), qkv_bias=True, qk_norm=qk_norm)
    count, size, scale = experts
    mixture = LayerSpec(attention, MoESpec(count, 8, size, scale=scale, shared=DenseSpec(size)))
    config = parsed(released)
    plain = LayerSpec(attention, DenseSpec(dense))
    assert config.layers == (plain,) * first + (mixture,) * (layers - first)
    assert (config.hidden_size, config.vocab_size, config.norm_eps) == (hidden, 151552, 1e-5)
    assert (config.bos_token_id, config.eos_token_ids) == (None, (151329, 151336, 151338))
    assert config.mtp == MTPConfig(
        (mixture,),
        concat="embed_first",
        target_hidden="post",
        feed="chain_post",
        norm="own",
        zero_first_embedding=False,
    )


# --- Inkling ---


@pytest.mark.parametrize(
    ("released", "hidden", "heads", "sliding_kv_heads", "dense", "expert", "layers", "divisor"),
    [
        (INKLING, 6144, 64, 16, 24576, 3072, 66, 24.0),
        (INKLING_SMALL, 4096, 32, 8, 16384, 2048, 42, 16.0),
    ],
)
def test_inkling(
    released: dict[str, Any],
    hidden: int,
    heads: int,
    sliding_kv_heads: int,
    dense: int,
    expert: int,
    layers: int,
    divisor: float,
) -> None:
    sliding = AttentionSpec(
        heads,
        sliding_kv_heads,
        128,
        window=512,
        scale=1 / 128,
        qk_norm=True,
        relative=RelativeBias(16, 512),
    )
    full = AttentionSpec(
        heads,
        8,
        128,
        scale=1 / 128,
        qk_norm=True,
        relative=RelativeBias(16, 1024),
        log_scaling=LogScaling(128000, 0.1),
    )
    mlp = DenseSpec(dense, global_scale=True)
    experts = MoESpec(256, 6, expert, scale=8.0, global_scale=True, num_sinks=2)
    config = parsed(released)
    assert config == ModelConfig(
        "inkling",
        200058,
        hidden,
        tuple(
            LayerSpec(full if index % 6 == 5 else sliding, experts if index > 1 else mlp, 4)
            for index in range(layers)
        ),
        1048576,
        norm_eps=1e-6,
        padded_vocab_size=201024,
        embed_norm=True,
        logits_divisor=divisor,
        eos_token_ids=(200006,),
        mtp=MTPConfig(
            tuple(LayerSpec(full if index in (1, 3) else sliding, mlp, 4) for index in range(8)),
            concat="hidden_first",
            target_hidden="post",
            feed="chain_post",
            norm="none",
            embed_norm=True,
            zero_first_embedding=False,
            consumed_position=True,
        ),
    )


def inkling(**changes: Any) -> dict[str, Any]:
    """Inkling with other modules."""
    return INKLING | {"mtp_config": INKLING["mtp_config"] | changes}


def test_options_of_inklings_modules() -> None:
    alias = inkling(num_nextn_predict_layers=None, n_layers=8)
    assert parsed(alias) == parsed(INKLING)
    assert parsed(inkling(num_nextn_predict_layers=0, local_layer_ids=[])).mtp is None
    mtp = parsed(inkling(chain_hidden_post_norm=True)).mtp
    assert mtp is not None and (mtp.norm, mtp.feed) == ("shared", "chain_post")
    mtp = parsed(inkling(local_layer_ids=None)).mtp
    assert mtp is not None and {layer.attention.window for layer in mtp.modules} == {None}
    mtp = parsed(inkling(local_extent=64)).mtp
    assert mtp is not None
    attention = mtp.modules[0].attention
    assert isinstance(attention, AttentionSpec)
    assert (attention.window, attention.relative) == (64, RelativeBias(16, 64))


# --- dialects ---


@pytest.mark.parametrize(
    "name", [name for name in GOLDENS if (ROOT / name / "config_hf.json").exists()]
)
def test_both_dialects_say_the_same(name: str) -> None:
    config = parsed(golden_config(name))
    saved = json.loads((ROOT / name / "config_hf.json").read_text())
    if config.bos_token_id is None:
        # transformers' default for a key that the release lacks.
        assert parsed(saved).bos_token_id in (None, 1)
        saved = saved | {"bos_token_id": None}
        if "text_config" in saved:
            saved["text_config"] = saved["text_config"] | {"bos_token_id": None}
    if name == "mimo_v2_flash":
        # Not saved by transformers, which has no modules for this family.
        assert "num_nextn_predict_layers" not in saved
    assert parsed(saved) == config


@pytest.mark.parametrize("name", RELEASED)
def test_quantized_releases_are_refused(name: str) -> None:
    quantized = RELEASED[name] | {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(ModelError, match=r"quantization_config=.*, which is not implemented"):
        parsed(quantized)
