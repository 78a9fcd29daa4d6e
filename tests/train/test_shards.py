"""Packed samples: what is written is read, and nothing incomplete or damaged is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmtp_jax.config import ConfigError
from mmtp_jax.train.shards import Dataset, Manifest, Shard, shard_path, token_dtype
from mmtp_jax.weights.errors import ModelError

Sample = tuple[list[int], list[int], float]
SAMPLES: list[Sample] = [
    ([1, 2, 3], [4, 5], 0.0),
    ([6], [7], 0.7),
    ([8, 9], [10, 11, 12], 1.0),
    ([13, 14], [63], 0.7),
]


def manifest(samples: int, shards: int, vocab_size: int = 64, **settings: Any) -> Manifest:
    dtype = token_dtype(vocab_size)
    return Manifest("tiny", vocab_size, {"seed": 0} | settings, samples, shards, dtype)


def write(folder: Path, samples: list[Sample], size: int = 3, vocab_size: int = 64) -> Path:
    """A complete folder with `size` samples in a shard."""
    parts = [samples[start : start + size] for start in range(0, len(samples), size)]
    whole = manifest(len(samples), len(parts), vocab_size)
    whole.claim(folder)
    for index, part in enumerate(parts):
        prompts, responses, temperatures = zip(*part, strict=True)
        shard = Shard.pack(prompts, responses, temperatures, whole.token_dtype)
        shard.write(shard_path(folder, index))
    return folder


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", SAMPLES)
    names = {"manifest.json", "shard-00000.npz", "shard-00001.npz"}
    assert {path.name for path in folder.iterdir()} == names
    data = Dataset.open(folder)
    assert len(data) == 4 and data.vocab_size == 64
    assert data.lengths.dtype == data.prompt_lengths.dtype == np.int32
    assert data.temperatures.dtype == np.float32
    assert data.lengths.tolist() == [5, 2, 5, 3]
    assert data.prompt_lengths.tolist() == [3, 1, 2, 2]
    np.testing.assert_array_equal(data.temperatures, np.float32([0, 0.7, 1, 0.7]))
    for index, (prompt, response, _) in enumerate(SAMPLES):
        tokens = data.tokens(np.int64(index))
        assert tokens.dtype == np.uint16 and tokens.base is data.all_tokens
        assert tokens.tolist() == prompt + response


def test_folders_are_joined(tmp_path: Path) -> None:
    folders = [write(tmp_path / "a", SAMPLES), write(tmp_path / "b", SAMPLES[:1])]
    data = Dataset.open(*folders, str(folders[1]))
    assert data.lengths.tolist() == [5, 2, 5, 3, 5, 5]
    assert data.tokens(5).tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(ConfigError, match="at least one folder"):
        Dataset.open()


def test_large_vocabularies(tmp_path: Path) -> None:
    assert (token_dtype(65536), token_dtype(65537)) == ("uint16", "uint32")
    folder = write(tmp_path / "large", [([1, 70000], [2], 0.0)], vocab_size=70001)
    data = Dataset.open(folder)
    assert data.tokens(0).dtype == np.uint32 and data.tokens(0).tolist() == [1, 70000, 2]
    with pytest.raises(ModelError, match=r"vocab_size must be the same .* 70001 in .*, 64 in "):
        Dataset.open(folder, write(tmp_path / "small", SAMPLES))


def test_equal_samples_give_equal_bytes(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", SAMPLES), write(tmp_path / "b", SAMPLES)
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()


def test_a_shard_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Shard.pack([[1]], [[2]], [0.0], "uint16")
    path = shard_path(tmp_path, 0)

    def interrupted(file: Any, **arrays: np.ndarray) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", interrupted)
        with pytest.raises(KeyboardInterrupt):
            shard.write(path)
    assert not path.exists()
    shard.write(path)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(np.uint16([13, 14]).tobytes())] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def replace(**arrays: Any) -> Callable[[Path], None]:
    """Write other arrays into a shard; None leaves one out."""

    def change(path: Path) -> None:
        changed = dict(np.load(path)) | arrays
        np.savez(path, **{name: array for name, array in changed.items() if array is not None})

    return change


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (Path.unlink, r"shard-00001\.npz is missing: the manifest names 2 shard\(s\)"),
        (cut, "is damaged"),
        (flip, "is damaged .*CRC"),
        (empty, "is damaged"),
        (replace(lengths=None), r"is damaged \(.*lengths"),
        (replace(lengths=np.int64([3])), "lengths must be int32 in one dimension, got int64"),
        (replace(lengths=np.int32([4])), "lengths add up to 4 of 3"),
        (replace(prompt_lengths=np.int32([3])), r"prompt_lengths must be in \[1, lengths\)"),
        (replace(prompt_lengths=np.int32([0])), r"prompt_lengths must be in \[1, lengths\)"),
        (replace(temperatures=np.float32([0, 1])), r"arrays are of \[1, 2\] samples"),
        (replace(tokens=np.uint16([1, 2, 64])), r"tokens must be in \[0, 63\], got 64"),
        (replace(tokens=np.array([None])), "is damaged"),
    ],
)
def test_damaged_shards_are_refused(
    tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    folder = write(tmp_path / "data", SAMPLES)
    damage(shard_path(folder, 1))
    with pytest.raises(ModelError, match=said) as refusal:
        Dataset.open(folder)
    assert "generate again with the same settings" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_shards_of_another_run_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", SAMPLES)
    (folder / "shard-00001.npz").write_bytes((folder / "shard-00000.npz").read_bytes())
    with pytest.raises(ModelError, match="hold 6 samples, but its manifest says 4"):
        Dataset.open(folder)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "holds no training data: it has no manifest.json"),
        ("{", "is not a usable manifest"),
        ("[]", "must be a JSON object"),
        ("{}", "its keys must be format, model, num_samples"),
        ({"format": 2}, "format must be 1, got 2"),
        ({"vocab_size": "64"}, "vocab_size must be an integer, got '64'"),
        ({"vocab_size": 0}, "vocab_size must be >= 1, got 0"),
        ({"token_dtype": "int8"}, "token_dtype must be uint16 for a vocabulary of 64, got 'int8'"),
        ({"num_shards": 0}, "num_shards must be >= 1, got 0"),
    ],
)
def test_damaged_manifests_are_refused(tmp_path: Path, content: Any, said: str) -> None:
    folder = write(tmp_path / "data", SAMPLES)
    path = folder / "manifest.json"
    if content is None:
        path.unlink()
    elif isinstance(content, str):
        path.write_text(content)
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | content))
    with pytest.raises(ModelError, match=said):
        Dataset.open(folder)


def test_a_folder_is_of_one_manifest(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", SAMPLES)
    ours = manifest(4, 2)
    ours.claim(folder)
    for other, said in (
        (manifest(4, 2, seed=1), "seed is 0 there and 1 here"),
        (manifest(8, 4, seed=1), "seed is 0 there and 1 here"),  # settings before their results
        (dataclasses.replace(ours, model="big"), "model is 'tiny' there and 'big' here"),
        (manifest(4, 2, vocab_size=65), "vocab_size is 64 there and 65 here"),
        (manifest(4, 2, new=True), "new is None there and True here"),
    ):
        with pytest.raises(ConfigError, match=f"holds data of other settings: {said}"):
            other.claim(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"holds shards without a manifest\.json"):
        ours.claim(folder)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write training data to"):
        ours.claim(tmp_path / "file")
