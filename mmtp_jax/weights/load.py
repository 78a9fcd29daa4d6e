"""Fill the parameters of a model from a checkpoint, strictly."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import numpy as np

from mmtp_jax.families.family import Family
from mmtp_jax.families.registry import FAMILIES
from mmtp_jax.families.tensors import EMBEDDING, HEAD
from mmtp_jax.specs import ModelConfig
from mmtp_jax.weights.checkpoint import Checkpoint
from mmtp_jax.weights.errors import ModelError

_LISTED = 5
_ROPE_BUFFER = re.compile(r".*\brotary_emb\.inv_freq")

Shapes = Mapping[str, tuple[int, ...]]


class ParameterReader:
    """Reads parameters by path, each tensor when it is asked for, so that the host holds no
    more than those of one array on the device at a time.

    `config` may have fewer MTP modules than the checkpoint: the tensors of the others are never
    read. `expected` is the shape of every parameter of `config`.
    """

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, expected: Shapes) -> None:
        self._checkpoint = checkpoint
        self._expected = expected
        self._family = FAMILIES[config.family]
        self._sources = self._family.sources(config)
        for problem, names in problems(checkpoint, config, expected):
            raise ModelError(f"the checkpoint {problem} {shortened(names)}")
        self._check_copies(config)
        self._position = {name: index for index, name in enumerate(checkpoint.names())}

    def read(self, path: str, dtype: np.dtype) -> np.ndarray:
        """The parameter as `dtype`."""
        source = self._sources[path]
        return source.value(self._checkpoint.read, self._expected[path], dtype)

    def position(self, path: str) -> int:
        """Where the parameter's tensor lies among all, for reading file after file."""
        return self._position[self._sources[path].names[0]]

    def _check_copies(self, config: ModelConfig) -> None:
        """Tensors that repeat others must hold the same."""
        names = self._checkpoint.names()
        for copy, original in _copies(self._family, config).items():
            if copy not in names or original not in names:
                continue
            if not np.array_equal(self._checkpoint.read(copy), self._checkpoint.read(original)):
                raise ModelError(
                    f"the checkpoint's {copy} should repeat {original} but differs from it"
                )


def problems(
    checkpoint: Checkpoint, config: ModelConfig, expected: Shapes
) -> Iterable[tuple[str, list[str]]]:
    """What is wrong with the names and shapes of a checkpoint: sentences' middles, and tensors."""
    stored = checkpoint.names()
    sources = FAMILIES[config.family].sources(config)
    missing: dict[str, None] = {}
    different: dict[str, None] = {}
    for path, shape in expected.items():
        if path not in sources:
            raise ModelError(
                f"no tensor of a {config.family} checkpoint fills the parameter {path}"
            )
        wanted = sources[path].stored_shape(shape)
        for name in sources[path].names:
            if name not in stored:
                missing[name] = None
            elif stored[name] != wanted:
                different[f"{name} is {stored[name]} but must be {wanted}"] = None
    unused = _unused(stored, checkpoint.config)
    for problem, names in (
        ("lacks the tensors", list(missing)),
        ("has tensors of the wrong shape:", list(different)),
        ("has tensors that this model does not use:", unused),
    ):
        if names:
            yield problem, names


def shortened(names: list[str]) -> str:
    """The first few of many."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _unused(stored: Shapes, shipped: ModelConfig) -> list[str]:
    """Tensors that neither the target nor any shipped module takes."""
    family = FAMILIES[shipped.family]
    known = {name for source in family.sources(shipped).values() for name in source.names}
    known |= _copies(family, shipped).keys()
    return [
        name
        for name in stored
        if name not in known
        and not name.startswith(family.skipped)
        and not _ROPE_BUFFER.fullmatch(name)
    ]


def _copies(family: Family, config: ModelConfig) -> dict[str, str]:
    """Some tied checkpoints store the head too: the embedding once more."""
    copies = family.copies(config)
    return copies | {HEAD: EMBEDDING} if config.tie_embeddings else copies
