"""Modules that are stored apart beside a target, and those that come with a known model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from llm_for_tests import assert_idle, parameters, prompt_ids
from modules_for_tests import MODULES, RECOMMENDED, load, store, write_trunk, write_whole
from weights.gguf_for_tests import write_tiny_gguf

from mmtp_jax.bench.presets import ModelOptions
from mmtp_jax.config import ConfigError, EngineConfig, SpeculativeConfig, engine_config
from mmtp_jax.inspect import main as inspect
from mmtp_jax.llm import LLM
from mmtp_jax.loader import LoadedModel, describe
from mmtp_jax.modules import default
from mmtp_jax.modules.default import default_modules, with_default_modules
from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.weights.errors import ModelError
from mmtp_jax.weights.resolve import DEFAULT_MODEL


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def whole(root: Path) -> LoadedModel:
    return load(write_whole(root / "whole"))


@pytest.fixture(scope="module")
def engine(whole: LoadedModel) -> Iterator[LLM]:
    with LLM.from_loaded(whole) as llm:
        yield llm


@pytest.fixture(scope="module")
def trunk(root: Path) -> Path:
    return write_trunk(root / "trunk")


@pytest.fixture(scope="module")
def modules(root: Path, whole: LoadedModel) -> Path:
    return store(whole, root / "modules")


def assert_same(one: LoadedModel, other: LoadedModel) -> None:
    mine, theirs = parameters(one), parameters(other)
    assert one.graph.config.mtp == other.graph.config.mtp and mine.keys() == theirs.keys()
    for name, value in mine.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)


# --- what they draft ---


def test_stored_modules_draft_what_shipped_ones_draft(
    engine: LLM, whole: LoadedModel, trunk: Path, modules: Path
) -> None:
    apart = load(trunk, {"model": str(modules), "num_speculative_tokens": MODULES})
    assert_same(apart, whole)
    prompts = [prompt_ids(length) for length in (1, 2, 5, 11, 20)]
    params = [
        SamplingParams(max_tokens=24, temperature=temperature, seed=7, ignore_eos=True)
        for temperature in (0.0, 0.0, 1.0, 0.7, 0.0)
    ]
    ids = prompt_ids(30, seed=1)
    texts, counts, scores = [], [], []
    with LLM.from_loaded(apart) as other:
        for llm in (engine, other):
            texts.append([output.token_ids for output in llm.generate(prompts, params)])
            stats = llm.stats()
            counts.append([stats[f"{what}_by_position"] for what in ("drafted", "accepted")])
            scores.append(llm.score(ids))
            assert_idle(llm)
    assert texts[0] == texts[1]
    assert counts[0] == counts[1] and sum(counts[0][0]) > 0
    for name, logits in scores[0].items():
        np.testing.assert_array_equal(logits, scores[1][name], err_msg=name)


def test_int8_modules_change_no_text(
    engine: LLM, whole: LoadedModel, trunk: Path, tmp_path: Path
) -> None:
    folder = store(whole, tmp_path / "int8", "int8")
    apart = load(trunk, {"model": str(folder), "num_speculative_tokens": MODULES})
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    texts, scores = [], []
    with LLM.from_loaded(apart) as other:
        for llm in (engine, other):
            texts.append(llm.generate([prompt_ids(9)], params)[0].token_ids)
            scores.append(llm.score(prompt_ids(20)))
    assert texts[0] == texts[1]
    exact, rounded = (score["mtp_logits"][:, :15] for score in scores)
    assert 0 < np.abs(exact - rounded).max() < 0.05 * np.abs(exact).max()


def test_modules_of_a_quantized_or_renamed_target(tmp_path: Path) -> None:
    """A GGUF file and a directory of the same target: other family, other eps, float32."""
    changes = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    qwen2, _ = write_tiny_gguf(tmp_path / "tiny.gguf", architecture="qwen2", **changes)
    mimo = write_whole(tmp_path / "whole", **changes, bos_token_id=None, eos_token_id=[3, 4])
    folder = store(load(mimo), tmp_path / "modules")
    loaded = load(qwen2, {"model": str(folder)})
    assert loaded.graph.config.family == "qwen2" and loaded.graph.config.num_drafts == RECOMMENDED


# --- how many ---


@pytest.mark.parametrize(("k", "drafts"), [(None, RECOMMENDED), (1, 1), (MODULES, MODULES), (0, 0)])
def test_number_of_drafts(trunk: Path, modules: Path, k: int | None, drafts: int) -> None:
    loaded = load(trunk, {"model": str(modules), "num_speculative_tokens": k})
    assert loaded.graph.config.num_drafts == loaded.config.speculative.num_drafts == drafts
    assert loaded.graph.config.num_modules == drafts
    assert loaded.config.speculative.modules_in_checkpoint == MODULES


def test_more_than_there_are(trunk: Path, modules: Path) -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens=4 exceeds the 3 MTP module"):
        load(trunk, {"model": str(modules), "num_speculative_tokens": 4})


def test_a_lone_module_may_be_repeated(trunk: Path, tmp_path: Path) -> None:
    lone = load(write_whole(tmp_path / "whole", modules=1))
    folder = store(lone, tmp_path / "modules", num_speculative_tokens=1)
    speculative = {"model": str(folder), "num_speculative_tokens": 3}
    config = load(trunk, speculative).graph.config
    assert (config.num_modules, config.num_drafts) == (1, 3)


def test_given_modules_win_over_those_that_a_target_ships(
    root: Path, modules: Path, tmp_path: Path
) -> None:
    other = write_whole(tmp_path / "other", modules=1)
    loaded = load(other, {"model": str(modules), "num_speculative_tokens": MODULES})
    assert_same(loaded, load(root / "whole"))


# --- what is refused ---


def test_another_target(modules: Path, tmp_path: Path) -> None:
    speculative = {"model": str(modules)}
    with pytest.raises(ModelError, match="for another target: hidden_size 32, not 64"):
        load(write_trunk(tmp_path / "wide", hidden_size=64), speculative)
    with pytest.raises(ModelError, match="of this architecture: its final norm differs by up to"):
        load(write_trunk(tmp_path / "seed", seed=1), speculative)
    with pytest.raises(ModelError, match="there is no folder of MTP modules at"):
        load(write_trunk(tmp_path / "trunk"), {"model": str(tmp_path / "nowhere")})


def test_random_weights_and_trained_modules() -> None:
    with pytest.raises(ConfigError, match="it cannot go with those of some/where"):
        SpeculativeConfig(model="some/where", load_format="dummy")
    with pytest.raises(ConfigError, match="random target, for which no modules were trained"):
        engine_config("any", {"model": "some/where"}, load_format="dummy")
    with pytest.raises(ConfigError, match="model must be a string or None"):
        engine_config("any", {"model": 3})


# --- what is said of them ---


def test_the_start_line_names_them(trunk: Path, modules: Path) -> None:
    text = describe(load(trunk, {"model": str(modules)}))
    assert f"MTP modules 3 ({modules}), speculative tokens 2," in text


def test_inspect(
    trunk: Path, modules: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect([str(trunk), "--speculative-model", str(modules)]) == 0
    output = capsys.readouterr().out
    assert "MTP           3 module(s), hidden_first" in output
    assert f"modules from  {modules}, bfloat16, 2 speculative tokens recommended\n" in output
    other = write_trunk(tmp_path / "seed", seed=1)
    assert inspect([str(other), "--speculative-model", str(modules)]) == 1
    assert "refused       the modules were trained for another target" in capsys.readouterr().out
    wide = write_trunk(tmp_path / "wide", hidden_size=64)
    assert inspect([str(wide), "--speculative-model", str(modules)]) == 1
    assert "hidden_size 32, not 64" in capsys.readouterr().err


def test_benchmarks_take_them(trunk: Path, modules: Path) -> None:
    options = ModelOptions(str(trunk), "auto", "float32", 0, {}, 1, str(modules))
    loaded = options.load(MODULES, max_model_len=32)
    assert loaded.config.speculative.load_format == "auto"
    assert loaded.config.speculative.model == str(modules)
    assert options.load(0, max_model_len=32).graph.config.num_modules == 0


# --- those that come with a known model ---


def test_default_modules(
    trunk: Path, modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A known name for the tiny target, whose modules are first absent, then there."""
    monkeypatch.setattr(default, "DEFAULT_MODULES", {str(trunk): "tiny-mtp3"})
    places = (tmp_path / "installed", tmp_path / "working-copy")
    monkeypatch.setattr(default, "PLACES", places)
    assert load(trunk).graph.config.num_drafts == 0
    folder = Path(shutil.copytree(modules, places[1] / "tiny-mtp3"))
    loaded = load(trunk)
    assert loaded.config.speculative.model == str(folder)
    assert loaded.graph.config.num_drafts == RECOMMENDED
    assert load(trunk, {"num_speculative_tokens": MODULES}).graph.config.num_drafts == MODULES
    for off in ({"num_speculative_tokens": 0}, {"method": None}):
        assert load(trunk, off).config.speculative.model is None
        assert load(trunk, off).graph.config.num_drafts == 0
    assert load(trunk, {"load_format": "dummy"}).config.speculative.model is None
    assert load(trunk, load_format="dummy").config.speculative.model is None
    other = {"model": str(modules)}
    assert load(trunk, other).config.speculative.model == str(modules)
    measured = ModelOptions(str(trunk), "auto", "float32", 0, {}, 1)
    assert measured.load(2, max_model_len=32).config.speculative.model == str(folder)
    # A half-written folder is an error, not silence.
    (folder / "modules.json").unlink()
    with pytest.raises(ModelError, match=r"tiny-mtp3 has no modules\.json"):
        load(trunk)


def test_where_default_modules_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    assert default.PLACES == (root / "mmtp_jax" / "checkpoints", root / "checkpoints")
    monkeypatch.setattr(default, "PLACES", (tmp_path,))
    assert default_modules(DEFAULT_MODEL) is None
    assert with_default_modules(EngineConfig()) == EngineConfig()
    folder = tmp_path / "smollm2-135m-mtp8"
    folder.mkdir()
    assert default_modules(DEFAULT_MODEL) == folder
    assert with_default_modules(EngineConfig()).speculative.model == str(folder)
    assert default_modules(str(tmp_path)) is None
