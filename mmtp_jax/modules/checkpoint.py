"""Saving modules apart from their target, and opening them again.

`modules.json` says what the modules are and holds a CRC-32 of every file of `parameters/`, which
also keeps the final norm of the target ("norm.scale").
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from mmtp_jax.checks import require
from mmtp_jax.families.settings import Settings
from mmtp_jax.models.model import ModelGraph, Params, model_graph
from mmtp_jax.modules.codec import decode, encode
from mmtp_jax.modules.identity import TargetIdentity
from mmtp_jax.modules.storage import STORAGES, Storage, restored, stored, stored_shapes
from mmtp_jax.specs import ModelConfig, MTPConfig
from mmtp_jax.weights.directory import new_directory
from mmtp_jax.weights.errors import ModelError
from mmtp_jax.weights.safetensors_reader import read_json

FORMAT = 1

_DESCRIPTION = "modules.json"
_PARAMETERS = "parameters"
_FINAL_NORM = "norm.scale"
# Bytes after which Orbax begins another file; without a limit nearly all lies in one.
_FILE_SIZE = 4 << 20


def save_modules(
    folder: Path,
    graph: ModelGraph,
    params: Params,
    *,
    storage: Storage,
    num_speculative_tokens: int,
    facts: Mapping[str, Any],
) -> None:
    """Write the modules of a model to `folder`, which appears whole or not at all.

    `num_speculative_tokens` is the number of drafts to recommend, `facts` whatever else is worth
    keeping (JSON). Raises `ConfigError` if the model has no modules, the number is none of theirs,
    a value is not finite, or `folder` exists and is not empty.
    """
    mtp = graph.config.mtp
    require(mtp is not None, "a model without MTP modules has none to save")
    assert mtp is not None
    require(storage in STORAGES, f"storage must be one of {STORAGES}, got {storage!r}")
    _check_count(num_speculative_tokens, mtp)
    arrays: dict[str, np.ndarray] = {}
    for name, value, exact in _parameters(graph, params):
        finite = np.isfinite(value.astype(np.float32)).all()
        require(bool(finite), f"{name} holds values that are not finite")
        arrays |= stored(name, value, storage, exact=exact)
    description = {
        "format": FORMAT,
        "storage": storage,
        "num_speculative_tokens": num_speculative_tokens,
        "facts": dict(facts),
        "target": encode(replace(graph.config, mtp=None)),
        "mtp": encode(replace(mtp, repeats=1)),
    }
    json.dumps(description)  # fails for facts that are not JSON before anything is written
    with new_directory(folder) as partial:
        with _orbax() as checkpointer:
            args = ocp.args.PyTreeSave(arrays, ocdbt_target_data_file_size=_FILE_SIZE)
            checkpointer.save(partial.resolve() / _PARAMETERS, args=args)
        # Says where it was written; nothing reads it on a file system that can rename folders.
        (partial / _PARAMETERS / "commit_success.txt").unlink(missing_ok=True)
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        sums = {path.relative_to(partial).as_posix(): _crc32(path) for path in files}
        text = json.dumps(description | {"crc32": sums}, indent=1)
        (partial / _DESCRIPTION).write_text(text + "\n", encoding="utf-8")


def open_modules(folder: str | Path) -> ModuleCheckpoint:
    """Open what `save_modules` wrote; the values stay on disk until one is read.

    Raises `ModelError` if the folder is missing, half-written, damaged, or of another format.
    """
    try:
        path = Path(folder).expanduser()
        there = path.is_dir()
    except (OSError, RuntimeError) as error:  # too long, not to be entered, no such user's home
        raise ModelError(f"cannot look for the modules {str(folder)!r}: {error}") from None
    if not there:
        raise ModelError(f"there is no folder of MTP modules at {folder}")
    return ModuleCheckpoint(path)


class ModuleCheckpoint:
    """Stored modules; `config` has their layers and wiring, `storage` says how values are kept.

    `num_speculative_tokens` is the recommended number of drafts, `facts` what was saved beside.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        where = folder / _DESCRIPTION
        settings = Settings(read_json(where), where=str(where))
        version = settings.integer("format")
        if version != FORMAT:
            raise ModelError(f"{where} is of format {version}, but only {FORMAT} is implemented")
        storage = settings.text("storage")
        self.num_speculative_tokens: int = settings.integer("num_speculative_tokens")
        for key in ("facts", "target", "mtp", "crc32"):
            if not isinstance(settings.peek(key), dict):
                raise ModelError(f"{where} lacks the object {key!r}")
        self.facts: dict[str, Any] = settings.peek("facts")
        try:
            self._target = _decoded(ModelConfig, settings.peek("target"))
            self.config = _decoded(MTPConfig, settings.peek("mtp"))
            require(storage in STORAGES, f"storage must be one of {STORAGES}, got {storage!r}")
            _check_count(self.num_speculative_tokens, self.config)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ModelError(f"{where} is damaged: {error}") from None
        self.storage: Storage = storage
        self._check_files(settings.peek("crc32"))
        self._check_shapes()

    @cached_property
    def identity(self) -> TargetIdentity:
        """The target that the modules were trained for."""
        return TargetIdentity(self._target, self.read(_FINAL_NORM))

    def beside(self, target: ModelConfig) -> ModelConfig:
        """`target` with these modules instead of its own; `ModelError` if it is not the one that
        they were trained for."""
        self.identity.check_architecture(target)
        return replace(target, mtp=self.config)

    def names(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every parameter of the modules by name, as `ModelGraph.shapes` has them."""
        return {name: shape for name, (shape, _) in self._expected.items() if name != _FINAL_NORM}

    def read(self, name: str) -> np.ndarray:
        """One parameter, as float32 or bfloat16; the first call reads all from disk."""
        return restored(name, self._arrays)

    @cached_property
    def _expected(self) -> dict[str, tuple[tuple[int, ...], bool]]:
        """The shape of every stored parameter, and whether it stays float32."""
        # One layer of the target is enough to describe its modules.
        model = replace(self._target, layers=self._target.layers[:1], mtp=self.config)
        return {
            piece.name: (piece.shape, leaf.float32)
            for leaf in model_graph(model).leaves()
            for piece in leaf.pieces
            if _is_stored(piece.name)
        }

    @cached_property
    def _stored(self) -> dict[str, tuple[int, ...]]:
        """The shape of every array that has to be there."""
        found: dict[str, tuple[int, ...]] = {}
        for name, (shape, exact) in self._expected.items():
            found |= stored_shapes(name, shape, self.storage, exact=exact)
        return found

    @cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        wanted = dict.fromkeys(self._stored, ocp.RestoreArgs(restore_type=np.ndarray))
        args = ocp.args.PyTreeRestore(restore_args=wanted)
        return self._read_by_orbax(lambda checkpointer, path: checkpointer.restore(path, args=args))

    def _check_files(self, sums: Mapping[str, Any]) -> None:
        """`ModelError` unless every file is as it was written. Orbax would find some of it only,
        and while other reads are under way."""
        for name, expected in sums.items():
            try:
                found = _crc32(self.folder / name)
            except (OSError, ValueError) as error:
                raise ModelError(
                    f"{self.folder} is not whole: cannot read {name}: {error}"
                ) from None
            if found != expected:
                raise ModelError(f"{self.folder} is damaged: {name} is not what was saved")

    def _check_shapes(self) -> None:
        """`ModelError` unless the stored arrays are exactly those that the specs call for."""
        found = self._read_by_orbax(
            lambda checkpointer, path: {
                name: tuple(array.shape)
                for name, array in checkpointer.metadata(path).item_metadata.items()
            }
        )
        wanted = self._stored
        for name in sorted(wanted.keys() | found.keys()):
            if wanted.get(name) != found.get(name):
                raise ModelError(
                    f"{self.folder} holds {name} of shape {found.get(name, '(absent)')}, but"
                    f" {_DESCRIPTION} calls for {wanted.get(name, 'no such array')}"
                )

    def _read_by_orbax[T](self, read: Callable[[ocp.Checkpointer, Path], T]) -> T:
        path = self.folder.resolve() / _PARAMETERS
        try:
            with _orbax() as checkpointer:
                return read(checkpointer, path)
        except Exception as error:
            # Orbax and TensorStore raise many kinds of errors for files that are not whole.
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ModelError(f"{path} is missing, half-written or damaged: {reason}") from error


@contextmanager
def _orbax() -> Iterator[ocp.Checkpointer]:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        yield checkpointer


def _parameters(graph: ModelGraph, params: Params) -> Iterator[tuple[str, np.ndarray, bool]]:
    """Name and value of what is stored, and whether the model keeps it in float32."""
    for leaf, param in zip(graph.leaves(), params, strict=True):
        if any(map(_is_stored, leaf.names)):
            for name, value in leaf.parts(np.asarray(jax.device_get(param))):
                yield name, value, leaf.float32


def _is_stored(name: str) -> bool:
    return name.startswith("mtp.") or name == _FINAL_NORM


def _crc32(path: Path) -> int:
    return zlib.crc32(path.read_bytes())


def _check_count(num_speculative_tokens: int, mtp: MTPConfig) -> None:
    require(
        1 <= num_speculative_tokens <= mtp.num_modules,
        f"num_speculative_tokens must be in [1, {mtp.num_modules}], one per module, got"
        f" {num_speculative_tokens}",
    )


def _decoded[T](kind: type[T], value: object) -> T:
    spec = decode(value)
    require(isinstance(spec, kind), f"there is no {kind.__name__} where one should be")
    assert isinstance(spec, kind)
    return spec
