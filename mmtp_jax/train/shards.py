"""Samples on disk: a folder with a manifest and packed shards, and all of them as one data set.

`manifest.json` says what the samples are; `shard-00000.npz` and its successors hold
tokens [sum of lengths] one sample after the other, lengths int32[S] (prompt and response),
prompt_lengths int32[S] and temperatures float32[S]. A file is whole or absent: it is written under
another name first.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import IO, Any, SupportsIndex

import numpy as np
from jaxtyping import Float32, Int32, Int64, UInt

from mmtp_jax.checks import ConfigError, check_types, require
from mmtp_jax.weights.errors import ModelError

FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """What a folder holds once it is complete. `settings` say how the samples were drawn."""

    model: str
    vocab_size: int
    settings: dict[str, Any]
    num_samples: int
    num_shards: int
    token_dtype: str
    format: int = FORMAT

    def __post_init__(self) -> None:
        check_types(self)
        require(self.format == FORMAT, f"format must be {FORMAT}, got {self.format}")
        require(self.vocab_size >= 1, f"vocab_size must be >= 1, got {self.vocab_size}")
        expected = token_dtype(self.vocab_size)
        require(
            self.token_dtype == expected,
            f"token_dtype must be {expected} for a vocabulary of {self.vocab_size},"
            f" got {self.token_dtype!r}",
        )
        require(self.num_shards >= 1, f"num_shards must be >= 1, got {self.num_shards}")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a folder; `ModelError` if there is none or it is no such thing."""
        path = folder / "manifest.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            require(isinstance(content, dict), "it must be a JSON object")
            names = {field.name for field in fields(cls)}
            require(content.keys() == names, f"its keys must be {', '.join(sorted(names))}")
            return cls(**content)
        except FileNotFoundError:
            raise ModelError(f"{folder} holds no training data: it has no manifest.json") from None
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{path} is not a usable manifest: {error}") from None

    def claim(self, folder: Path) -> None:
        """Make `folder` one of this manifest, or find that it is.

        Raises `ConfigError` naming what differs if it is another's, and if it cannot be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / "manifest.json").exists():
                self._require_same(Manifest.read(folder), folder)
                return
            require(
                not any(folder.glob("shard-*.npz")),
                f"{folder} holds shards without a manifest.json: choose an empty folder",
            )
            text = json.dumps(asdict(self), indent=1) + "\n"
            write_whole(folder / "manifest.json", lambda file: file.write(text.encode()))
        except OSError as error:
            raise ConfigError(f"cannot write training data to {folder}: {error}") from None

    def _require_same(self, other: Manifest, folder: Path) -> None:
        ours, theirs = ({**asdict(one), **one.settings} for one in (self, other))
        for name in sorted(ours.keys() | theirs.keys(), key=lambda name: name not in self.settings):
            if name != "settings":
                require(
                    ours.get(name) == theirs.get(name),
                    f"{folder} holds data of other settings: {name} is {theirs.get(name)!r} there"
                    f" and {ours.get(name)!r} here",
                )


def token_dtype(vocab_size: int) -> str:
    """The dtype that tokens of such a vocabulary are kept in."""
    return "uint16" if vocab_size <= 65536 else "uint32"


@dataclass(frozen=True, eq=False)
class Shard:
    """Samples one after the other: tokens of all, and by sample the lengths and the temperature."""

    tokens: UInt[np.ndarray, " T"]
    lengths: Int32[np.ndarray, " S"]
    prompt_lengths: Int32[np.ndarray, " S"]
    temperatures: Float32[np.ndarray, " S"]

    @classmethod
    def pack(
        cls,
        prompts: Sequence[Sequence[int] | np.ndarray],
        responses: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        dtype: str,
    ) -> Shard:
        """A shard of the samples in their order."""
        pairs = list(zip(prompts, responses, strict=True))
        parts = [np.asarray(part, dtype) for pair in pairs for part in pair]
        return cls(
            tokens=np.concatenate(parts),
            lengths=np.array([len(prompt) + len(response) for prompt, response in pairs], np.int32),
            prompt_lengths=np.array([len(prompt) for prompt in prompts], np.int32),
            temperatures=np.array(temperatures, np.float32),
        )

    def write(self, path: Path) -> None:
        """Write to `path`, all or nothing."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        write_whole(path, lambda file: np.savez(file, **arrays))

    @classmethod
    def read(cls, path: Path, manifest: Manifest) -> Shard:
        """The shard at `path`; `ModelError` if it is not there, damaged or not of `manifest`."""
        names = [field.name for field in fields(cls)]
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                shard = cls(**{name: arrays[name] for name in names})
            shard._check(manifest)
        except FileNotFoundError:
            raise ModelError(
                f"{path} is missing: the manifest names {manifest.num_shards} shard(s);"
                " generate again with the same settings to complete them"
            ) from None
        except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
            reason = " ".join(str(error.args[0] if error.args else error).split())
            raise ModelError(
                f"{path} is damaged ({reason}): delete it and generate again with the same settings"
            ) from None
        return shard

    def _check(self, manifest: Manifest) -> None:
        for field, dtype in zip(
            fields(self), (manifest.token_dtype, "int32", "int32", "float32"), strict=True
        ):
            array = getattr(self, field.name)
            require(
                array.ndim == 1 and array.dtype == dtype,
                f"{field.name} must be {dtype} in one dimension, got {array.dtype}{array.shape}",
            )
        sizes = {self.lengths.size, self.prompt_lengths.size, self.temperatures.size}
        require(len(sizes) == 1, f"its arrays are of {sorted(sizes)} samples")
        require(
            bool(np.all((self.prompt_lengths > 0) & (self.prompt_lengths < self.lengths))),
            "prompt_lengths must be in [1, lengths)",
        )
        total = int(self.lengths.sum(dtype=np.int64))
        require(total == self.tokens.size, f"lengths add up to {total} of {self.tokens.size}")
        largest = int(self.tokens.max(initial=0))
        require(
            largest < manifest.vocab_size,
            f"tokens must be in [0, {manifest.vocab_size - 1}], got {largest}",
        )


def shard_path(folder: Path, index: int) -> Path:
    """Where a shard of a folder is."""
    return folder / f"shard-{index:05}.npz"


@dataclass(frozen=True, eq=False)
class Dataset:
    """All samples of some folders in memory, in the order of folders and shards.

    `all_tokens` has them one after the other; lengths and temperatures are by sample.
    """

    all_tokens: UInt[np.ndarray, " T"]
    lengths: Int32[np.ndarray, " S"]
    prompt_lengths: Int32[np.ndarray, " S"]
    temperatures: Float32[np.ndarray, " S"]
    vocab_size: int

    @classmethod
    def open(cls, *folders: Path | str) -> Dataset:
        """Read every shard of the folders.

        Raises `ModelError` if a folder is no training data, incomplete or damaged, or if they are
        of different vocabularies.
        """
        require(bool(folders), "a data set needs at least one folder")
        manifests = [(Path(folder), Manifest.read(Path(folder))) for folder in folders]
        sizes = {manifest.vocab_size for _, manifest in manifests}
        if len(sizes) > 1:
            found = ", ".join(f"{one.vocab_size} in {path}" for path, one in manifests)
            raise ModelError(f"vocab_size must be the same in all folders, got {found}")
        shards: list[Shard] = []
        for folder, manifest in manifests:
            of_folder = [
                Shard.read(shard_path(folder, index), manifest)
                for index in range(manifest.num_shards)
            ]
            count = sum(shard.lengths.size for shard in of_folder)
            if count != manifest.num_samples:
                raise ModelError(
                    f"the shards of {folder} hold {count} samples, but its manifest says"
                    f" {manifest.num_samples}"
                )
            shards += of_folder
        return cls(
            np.concatenate([shard.tokens for shard in shards]),
            np.concatenate([shard.lengths for shard in shards]),
            np.concatenate([shard.prompt_lengths for shard in shards]),
            np.concatenate([shard.temperatures for shard in shards]),
            sizes.pop(),
        )

    def __len__(self) -> int:
        """The number of samples."""
        return self.lengths.size

    def tokens(self, index: SupportsIndex) -> UInt[np.ndarray, " L"]:
        """Prompt and response of a sample, a view."""
        start = self._starts[index]
        sample: np.ndarray = self.all_tokens[start : start + self.lengths[index]]
        return sample

    @cached_property
    def _starts(self) -> Int64[np.ndarray, " S"]:
        starts: np.ndarray = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        return starts


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file under another name and give it its own when it is complete."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        write(file)
    os.replace(part, path)
