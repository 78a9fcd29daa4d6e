"""How many parameters the released models have."""

from __future__ import annotations

from typing import Any

import pytest
from families.goldens import graph, shapes
from families.released import INKLING, INKLING_SMALL, RELEASED

from mmtp_jax.families.registry import FAMILIES, parse_config
from mmtp_jax.specs import ModelConfig

type Table = dict[str, tuple[int, ...]]


def inkling_layer(text: dict[str, Any], prefix: str, *, sliding: bool, dense: bool) -> Table:
    """Tensors of one block as the release lists them."""
    hidden, swa = text["hidden_size"], "swa_" if sliding else ""
    heads, kv_heads = text[f"{swa}num_attention_heads"], text[f"{swa}num_key_value_heads"]
    extent = text["sliding_window_size"] if sliding else text["rel_extent"]
    table: Table = {
        "attn_norm.weight": (hidden,),
        "mlp_norm.weight": (hidden,),
        "attn_sconv.weight": (hidden, 1, 4),
        "mlp_sconv.weight": (hidden, 1, 4),
        "attn.wq_du.weight": (heads * 128, hidden),
        "attn.wk_dv.weight": (kv_heads * 128, hidden),
        "attn.wv_dv.weight": (kv_heads * 128, hidden),
        "attn.wr_du.weight": (heads * 16, hidden),
        "attn.wo_ud.weight": (hidden, heads * 128),
        "attn.q_norm.weight": (128,),
        "attn.k_norm.weight": (128,),
        "attn.k_sconv.weight": (kv_heads * 128, 1, 4),
        "attn.v_sconv.weight": (kv_heads * 128, 1, 4),
        "attn.rel_logits_proj.proj": (16, extent),
    }
    if dense:
        wide = text["dense_intermediate_size"]
        table |= {
            "mlp.w13_dn.weight": (2 * wide, hidden),
            "mlp.w2_md.weight": (hidden, wide),
            "mlp.global_scale": (1,),
        }
    else:
        size = text["intermediate_size"]
        table |= {
            "mlp.gate.weight": (258, hidden),
            "mlp.gate.bias": (256,),
            "mlp.gate.global_scale": (1,),
            "mlp.experts.w13_weight": (256, 2 * size, hidden),
            "mlp.experts.w2_weight": (256, hidden, size),
            "mlp.shared_experts.shared_w13_weight": (2, 2 * size, hidden),
            "mlp.shared_experts.shared_w2_weight": (2, hidden, size),
        }
    return {f"{prefix}.{name}": shape for name, shape in table.items()}


def inkling_table(config: dict[str, Any]) -> Table:
    """Every tensor of Inkling's files but those of the towers."""
    text = config["text_config"]
    hidden, rows = text["hidden_size"], 201024
    table: Table = {
        "model.llm.embed.weight": (rows, hidden),
        "model.llm.embed_norm.weight": (hidden,),
        "model.llm.norm.weight": (hidden,),
        "model.llm.unembed.weight": (rows, hidden),
    }
    for index in range(text["num_hidden_layers"]):
        prefix = f"model.llm.layers.{index}"
        table |= inkling_layer(text, prefix, sliding=(index + 1) % 6 != 0, dense=index < 2)
    for index in range(8):
        prefix = f"model.mtp.layers.{index}"
        table |= {
            f"{prefix}.hidden_norm.weight": (hidden,),
            f"{prefix}.embed_norm.weight": (hidden,),
            f"{prefix}.input_proj.weight": (hidden, 2 * hidden),
        }
        block, sliding = f"{prefix}.transformer_block", index in (0, 2, 4, 5, 6, 7)
        table |= inkling_layer(text, block, sliding=sliding, dense=True)
    return table


def stored(config: ModelConfig) -> Table:
    """The tensors that this package expects in the files."""
    expected = shapes(config)
    return {
        name: source.stored_shape(expected[path])
        for path, source in FAMILIES[config.family].sources(config).items()
        for name in source.names
    }


def size(shape: tuple[int, ...]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total


def counts(config: ModelConfig) -> tuple[int, int]:
    """Parameters of the target and of the modules."""
    leaves = graph(config).leaves()
    modules = sum(leaf.num_values for leaf in leaves if leaf.names[0].startswith("mtp."))
    return sum(leaf.num_values for leaf in leaves) - modules, modules


@pytest.mark.parametrize(
    ("released", "target", "modules", "billions"),
    [
        (INKLING, 947_025_564_226, 5_260_445_704, ("947.0", "5.26")),
        (INKLING_SMALL, 263_655_199_274, 2_231_912_456, ("263.7", "2.23")),
    ],
)
def test_inkling(
    released: dict[str, Any], target: int, modules: int, billions: tuple[str, str]
) -> None:
    config, table = parse_config(released, {}), inkling_table(released)
    assert stored(config) == table
    in_modules = sum(size(shape) for name, shape in table.items() if ".mtp." in name)
    assert len([name for name in table if ".mtp." in name]) == 160
    assert counts(config) == (sum(map(size, table.values())) - in_modules, in_modules)
    assert counts(config) == (target, modules)
    assert (f"{target / 1e9:.1f}", f"{modules / 1e9:.2f}") == billions


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("Llama-3.1-8B", 8_030_261_248),
        ("Llama-3.2-1B", 1_235_814_400),
        ("SmolLM2-135M", 134_515_008),
        ("Qwen2.5-0.5B", 494_032_768),
        ("Qwen2.5-7B", 7_615_616_512),
        ("Qwen3-0.6B", 596_049_920),
        ("Qwen3-8B", 8_190_735_360),
        ("MiMo-7B", 7_833_409_536),
        ("GLM-4.5", 358_337_791_296),
        ("GLM-4.5-Air", 110_468_824_832),
    ],
)
def test_published_counts(name: str, published: int) -> None:
    """As the hub counts the values of the files: a module's copies of embedding and head too."""
    config = parse_config(RELEASED[name], {})
    copies = len(FAMILIES[config.family].copies(config)) * config.vocab_size * config.hidden_size
    assert sum(counts(config)) + copies == published


@pytest.mark.parametrize(
    ("name", "billions"),
    [("MiMo-V2-Flash", "308.8"), ("Step-3.5-Flash", "197.0"), ("DeepSeek-V3", "671.0")],
)
def test_rounded_counts(name: str, billions: str) -> None:
    """The target's alone, where the files hold more besides (scales of quantized weights)."""
    target, modules = counts(parse_config(RELEASED[name], {}))
    assert f"{target / 1e9:.1f}" == billions and modules > 0
