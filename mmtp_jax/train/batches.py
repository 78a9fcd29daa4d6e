"""Which samples a step takes: sequences of similar length, and the tokens in them to predict.

Every response token is predicted; the prompt is not, whose distribution is not the target's. All
batches of one length have the same shapes, so there are few programs. The batches of an epoch are a
function of the data, the options and the seed alone: training can go on anywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mmtp_jax.checks import require
from mmtp_jax.train.loss import ANCHORS_AT_ONCE
from mmtp_jax.train.options import PAGE, BatchOptions
from mmtp_jax.train.shards import Dataset
from mmtp_jax.train.step import Batch

# Share of all tokens below which a length of sequences is given up.
_RARE = 0.02


@dataclass(frozen=True)
class Shape:
    """Of one device's part of a batch: sequences, their length, and tokens to predict."""

    sequences: int
    length: int
    anchors: int


def padded_length(length: int) -> int:
    """The next of 64, 128, 192, 256, 384, 512, 768, ...: from 65 on, less than half is padding."""
    size = PAGE
    while size < length:
        power = 1 << (size.bit_length() - 1)
        size += max(power // 2, PAGE)
    return size


def _few(padded: np.ndarray) -> np.ndarray:
    """The same lengths, where those that hold few of all tokens are the next longer one: each takes
    a program of its own."""
    lengths = np.unique(padded)
    least = _RARE * float(padded.sum())
    for shorter, longer in itertools.pairwise(lengths):
        now = padded == shorter
        if now.sum() * shorter < least:
            padded = np.where(now, longer, padded)
    return padded


class Batches:
    """The samples `chosen` of a data set, for so many devices; `ConfigError` if one is too long."""

    def __init__(
        self, data: Dataset, chosen: Sequence[int] | np.ndarray, options: BatchOptions, devices: int
    ) -> None:
        self._data, self._options, self.devices = data, options, devices
        self._chosen = np.asarray(chosen, np.int64)
        require(len(self._chosen) > 0, "there are no samples to train on")
        lengths = data.lengths[self._chosen]
        self._padded = _few(np.array([padded_length(int(length)) for length in lengths]))
        longest = int(self._padded.max())
        require(
            longest <= options.batch_tokens,
            f"batch_tokens must be >= {longest} for samples of {int(lengths.max())} tokens,"
            f" got {options.batch_tokens}",
        )
        responses = lengths - data.prompt_lengths[self._chosen]
        self._shapes = {}
        for length in map(int, np.unique(self._padded)):
            sequences = options.batch_tokens // length
            mean = float(responses[self._padded == length].mean())
            # A batch of long responses has fewer sequences rather than all more room.
            wanted = min(max(int(1.05 * mean * sequences), length), sequences * length)
            # Few are not padded to as many as have logits at once: on a CPU those cost the most.
            unit = ANCHORS_AT_ONCE if wanted > ANCHORS_AT_ONCE else PAGE
            anchors = -(-wanted // unit) * unit
            self._shapes[length] = Shape(sequences, length, anchors)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """All that occur, shortest first."""
        return tuple(self._shapes.values())

    def epoch(self, number: int) -> list[tuple[Shape, list[list[int]]]]:
        """The batches of an epoch in their order: the samples of every device."""
        rng = np.random.default_rng([self._options.seed, number])
        order = rng.permutation(len(self._chosen))
        batches = []
        for length, shape in self._shapes.items():
            parts = list(self._parts(order[self._padded[order] == length], shape))
            for first in range(0, len(parts), self.devices):
                batch = parts[first : first + self.devices]
                batch += [[] for _ in range(self.devices - len(batch))]
                batches.append((shape, batch))
        return [batches[index] for index in rng.permutation(len(batches))]

    def _parts(self, order: np.ndarray, shape: Shape) -> Iterator[list[int]]:
        part: list[int] = []
        room = shape.anchors
        for index in order:
            sample = int(self._chosen[index])
            count = int(self._data.lengths[sample] - self._data.prompt_lengths[sample])
            if len(part) == shape.sequences or count > room:
                yield part
                part, room = [], shape.anchors
            part.append(sample)
            room -= count
        if part:
            yield part

    def load(self, shape: Shape, parts: Sequence[Sequence[int]]) -> Batch:
        """The arrays of a batch, in the host's memory."""
        return load(self._data, shape, parts)


def load(data: Dataset, shape: Shape, parts: Sequence[Sequence[int]]) -> Batch:
    """The arrays of a batch of these samples of every device, in the host's memory."""
    size = (len(parts), shape.anchors)
    tokens = np.zeros((len(parts), shape.sequences, shape.length), np.int32)
    row, token, at = (np.zeros(size, np.int32) for _ in range(3))
    for device, part in enumerate(parts):
        filled = 0
        for place, sample in enumerate(part):
            text = data.tokens(sample)
            tokens[device, place, : len(text)] = text
            own = np.arange(max(int(data.prompt_lengths[sample]), 1), len(text))
            anchors = slice(filled, filled + len(own))
            row[device, anchors] = place * shape.length + own - 1
            token[device, anchors] = text[own]
            at[device, anchors] = own
            filled += len(own)
    return Batch(tokens, row, token, at)
