"""A target and its modules in the layout of MiMo-7B, read back by our own loader."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llm_for_tests import parameters, prompt_ids
from models_for_tests import write_tiny_llama
from modules_for_tests import MODULES, load, store, write_whole
from weights.gguf_for_tests import write_tiny_gguf

from mmtp_jax.config import ConfigError, EngineConfig, engine_config
from mmtp_jax.export.__main__ import main
from mmtp_jax.export.mimo import mimo_config, mimo_model
from mmtp_jax.export.write import export_mimo
from mmtp_jax.llm import LLM
from mmtp_jax.loader import LoadedModel
from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.specs import AttentionSpec, DenseSpec, LayerSpec, ModelConfig, MTPConfig, RopeConfig
from mmtp_jax.tokenizer import load_tokenizer
from mmtp_jax.weights.checkpoint import open_checkpoint
from mmtp_jax.weights.errors import ModelError

RANDOM = {"num_speculative_tokens": MODULES, "load_format": "dummy"}


def config_for(model: Path, modules: Path | None = None, dtype: str = "float32") -> EngineConfig:
    speculative = None if modules is None else {"model": str(modules)}
    return engine_config(str(model), speculative, dtype=dtype)


def scores(loaded: LoadedModel) -> tuple[tuple[int, ...], dict[str, np.ndarray]]:
    with LLM.from_loaded(loaded) as llm:
        params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        return llm.generate([prompt_ids(7)], params)[0].token_ids, llm.score(prompt_ids(25))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return write_tiny_llama(folder, tokenizer=True)


@pytest.fixture(scope="module")
def modules(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random ones of the llama target."""
    return store(load(llama, RANDOM), tmp_path_factory.mktemp("stored") / "modules")


# --- round trips ---


def test_llama_with_modules_apart_in_float32(llama: Path, modules: Path, tmp_path: Path) -> None:
    count, size = export_mimo(tmp_path / "out", config_for(llama, modules))
    files = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert count == MODULES and 0 < size < files["model.safetensors"] < size + 10_000
    apart = load(llama, {"model": str(modules), "num_speculative_tokens": MODULES})
    back = load(tmp_path / "out")
    config = back.graph.config
    assert (config.family, config.num_modules) == ("mimo", MODULES)
    values, found = parameters(apart), parameters(back)
    biases = found.keys() - values.keys()
    # q, k and v of two layers and of the modules.
    assert len(biases) == 3 * (2 + MODULES) and not any(found[name].any() for name in biases)
    for name, value in values.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.slow
def test_exported_models_have_the_same_logits(llama: Path, modules: Path, tmp_path: Path) -> None:
    """As they must, having the same parameters and biases of zero."""
    export_mimo(tmp_path / "out", config_for(llama, modules))
    apart = load(llama, {"model": str(modules), "num_speculative_tokens": MODULES})
    text, logits = scores(apart)
    again, exported = scores(load(tmp_path / "out"))
    assert text == again
    for name, value in logits.items():
        np.testing.assert_allclose(exported[name], value, atol=1e-5, rtol=0, err_msg=name)


def test_llama_in_bfloat16(tmp_path: Path) -> None:
    llama = write_tiny_llama(tmp_path / "tied", tie_word_embeddings=True)
    modules = store(load(llama, RANDOM), tmp_path / "modules")
    export_mimo(tmp_path / "out", config_for(llama, modules, "bfloat16"))
    speculative = {"model": str(modules), "num_speculative_tokens": MODULES}
    values = parameters(load(llama, speculative, dtype="bfloat16"))
    for dtype in ("bfloat16", "float32"):
        found = parameters(load(tmp_path / "out", dtype=dtype))
        for name, value in values.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_mimo_with_modules_of_its_own(tmp_path: Path) -> None:
    source = write_whole(tmp_path / "whole", tokenizer=True, eos_token_id=[2, 4])
    generation = {"temperature": 0.6, "eos_token_id": 2}
    (source / "generation_config.json").write_text(json.dumps(generation))
    export_mimo(tmp_path / "out", config_for(source, dtype="bfloat16"))
    whole, back = load(source), load(tmp_path / "out")
    assert back.graph.config == whole.graph.config
    for name, value in parameters(whole).items():
        np.testing.assert_array_equal(parameters(back)[name], value, err_msg=name)
    found = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert found == {"temperature": 0.6, "bos_token_id": 1, "eos_token_id": [2, 4]}


def test_int8_modules_on_a_gguf_file(tmp_path: Path) -> None:
    vocabulary = [*"abcdefghijklmnop", "ab", "<s>", "</s>", *(f"<{i}>" for i in range(45))]
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [1] * 17 + [3] * 47,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 17,
        "tokenizer.ggml.eos_token_id": 18,
        "tokenizer.chat_template": "{% for m in messages %}<s>{{ m.content }}{% endfor %}",
    }
    model, _ = write_tiny_gguf(tmp_path / "tiny.gguf", keys=keys)
    folder = store(load(model, RANDOM), tmp_path / "modules", "int8")
    export_mimo(tmp_path / "out", config_for(model, folder))
    apart = load(model, {"model": str(folder), "num_speculative_tokens": MODULES})
    back = load(tmp_path / "out")
    for name, value in parameters(apart).items():
        np.testing.assert_array_equal(parameters(back)[name], value, err_msg=name)
    before, after = apart.tokenizer, back.tokenizer
    assert before is not None and after is not None
    messages = [{"role": "user", "content": "abba<3>"}]
    assert after.chat_ids(messages) == before.chat_ids(messages) != []
    assert (after.bos_token_id, after.eos_token_id) == (17, 18)
    assert back.graph.config.eos_token_ids == (18,)


def test_tokenizer_files_are_copied(llama: Path, modules: Path, tmp_path: Path) -> None:
    export_mimo(tmp_path / "out", config_for(llama, modules))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (llama / name).read_bytes()
    tokenizer = load_tokenizer(tmp_path / "out")
    assert tokenizer is not None and tokenizer.chat_ids([{"role": "user", "content": "hi"}])


def test_shards(llama: Path, modules: Path, tmp_path: Path) -> None:
    limit = 20_000
    _, size = export_mimo(tmp_path / "out", config_for(llama, modules), largest_file=limit)
    names = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(names) > 5
    assert names[0] == f"model-00001-of-{len(names):05}.safetensors"
    largest = max((tmp_path / "out" / name).stat().st_size for name in names)
    assert largest < limit + 4000  # of header
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": size}
    assert set(index["weight_map"].values()) == set(names)
    apart = load(llama, {"model": str(modules), "num_speculative_tokens": MODULES})
    found = parameters(load(tmp_path / "out"))
    for name, value in parameters(apart).items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert open_checkpoint(tmp_path / "out").names().keys() == index["weight_map"].keys()


# --- what the layout can and cannot say ---

ATTENTION = AttentionSpec(4, 2, 8, rope=RopeConfig(8))
LAYER = LayerSpec(ATTENTION, DenseSpec(48))
MODEL = ModelConfig(
    "llama", 64, 32, (LAYER,) * 3, 512, eos_token_ids=(2,), mtp=MTPConfig((LAYER,) * 2)
)


def with_attention(**changes: Any) -> ModelConfig:
    layer = LayerSpec(replace(ATTENTION, **changes), DenseSpec(48))
    assert MODEL.mtp is not None
    return replace(MODEL, layers=(layer,) * 3, mtp=replace(MODEL.mtp, modules=(layer,) * 2))


def written(model: ModelConfig) -> dict[str, Any]:
    config, _ = mimo_config(mimo_model(model), "float32", {})
    return config


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(8, 1e6),
        RopeConfig(8, 1e4, scaling="linear", factor=4.0),
        RopeConfig(8, 5e5, scaling="llama3", factor=8.0, original_max_position=256),
        RopeConfig(8, 1e4, scaling="yarn", factor=4.0, attention_factor=1.1, truncate=False),
    ],
)
def test_rotary_embeddings(rope: RopeConfig) -> None:
    assert written(with_attention(rope=rope))["rope_theta"] == rope.theta


def test_windows() -> None:
    sliding = LayerSpec(replace(ATTENTION, window=16), DenseSpec(48))
    config = written(replace(MODEL, layers=(LAYER, sliding, sliding)))
    assert (config["use_sliding_window"], config["max_window_layers"]) == (True, 1)
    config = written(replace(MODEL, layers=(sliding, LAYER, sliding)))
    assert config["layer_types"][1] == "full_attention"


def wired(**changes: Any) -> ModelConfig:
    assert MODEL.mtp is not None
    return replace(MODEL, mtp=replace(MODEL.mtp, **changes))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (replace(MODEL, family="qwen3"), "no place for a target of the family qwen3"),
        (replace(MODEL, mtp=None), "ships no MTP modules"),
        (with_attention(output_bias=True), "layers.0.attention.output_bias True, not False"),
        (with_attention(rope=RopeConfig(4)), "layers.0.attention.rope.dim 4, not 8"),
        (with_attention(window=16), "mtp.modules.0.attention.window 16, not None"),
        (replace(MODEL, logits_divisor=2.0), "logits_divisor 2, not 1"),
        (
            replace(MODEL, layers=(LAYER, LAYER, LayerSpec(ATTENTION, DenseSpec(64)))),
            "layers.2.mlp.size 64, not 48",
        ),
        (wired(concat="embed_first"), "mtp.concat embed_first, not hidden_first"),
        (wired(target_hidden="post"), "mtp.target_hidden post, not pre"),
        (wired(feed="target"), "mtp.feed target, not chain_post"),
        (wired(norm="none"), "mtp.norm none, not own"),
        (wired(own_head=True), "mtp.own_head True, not False"),
        (wired(zero_first_embedding=False), "mtp.zero_first_embedding False, not True"),
        (
            wired(modules=(LayerSpec(ATTENTION, DenseSpec(96)),)),
            "mtp.modules.0.mlp.size 96, not 48",
        ),
    ],
)
def test_what_the_layout_cannot_say(model: ModelConfig, reason: str) -> None:
    with pytest.raises(ModelError, match=r"MiMo layout|MTP modules") as error:
        written(model)
    assert reason in str(error.value)


# --- the command ---


def test_the_command(
    llama: Path, modules: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    arguments = ["--format", "mimo", out, "--model", str(llama)]
    assert main(arguments) == 2
    assert "ships no MTP modules" in capsys.readouterr().err
    arguments += ["--speculative-model", str(modules)]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith(f"{out}: 3 MTP modules, ")
    assert {str(open_checkpoint(Path(out)).read("model.norm.weight").dtype)} == {"bfloat16"}
    # It neither overwrites nor leaves anything behind.
    for directory in (out, str(llama / "config.json")):
        assert main([directory, *arguments[:2], *arguments[3:]]) == 2
        assert "exists already and is not an empty directory" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["out"]
    with pytest.raises(SystemExit):
        main([out, "--format", "gguf"])
    with pytest.raises(ConfigError, match="dtype must be bfloat16 or float32, got 'float16'"):
        export_mimo(tmp_path / "other", config_for(llama, modules, "float16"))


def test_nothing_is_left_of_an_export_that_fails(
    llama: Path, modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mmtp_jax.export.write.write_tokenizer", fail)
    with pytest.raises(ConfigError, match=r"cannot write .*: No space left on device"):
        export_mimo(tmp_path / "out", config_for(llama, modules))
    assert not os.listdir(tmp_path)
