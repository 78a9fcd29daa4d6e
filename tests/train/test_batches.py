"""Batches: every sample once an epoch, nothing lost or cut, the same whatever came before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmtp_jax.checks import ConfigError
from mmtp_jax.train.batches import Batches, padded_length
from mmtp_jax.train.loss import ANCHORS_AT_ONCE
from mmtp_jax.train.options import BatchOptions
from mmtp_jax.train.shards import Dataset


def dataset(sizes: list[tuple[int, int]]) -> Dataset:
    """Samples of these (prompt, response) lengths; all tokens of sample i are i + 1."""
    lengths = np.array([sum(size) for size in sizes], np.int32)
    return Dataset(
        all_tokens=np.repeat(np.arange(1, len(sizes) + 1), lengths).astype(np.uint16),
        lengths=lengths,
        prompt_lengths=np.array([prompt for prompt, _ in sizes], np.int32),
        temperatures=np.zeros(len(sizes), np.float32),
        vocab_size=len(sizes) + 1,
    )


SIZES = st.lists(st.tuples(st.integers(1, 80), st.integers(1, 200)), min_size=1, max_size=40)


@settings(max_examples=60)
@given(
    sizes=SIZES, tokens=st.integers(384, 4096), devices=st.integers(1, 3), seed=st.integers(0, 9)
)
def test_every_sample_comes_once_an_epoch(
    sizes: list[tuple[int, int]], tokens: int, devices: int, seed: int
) -> None:
    data = dataset(sizes)
    chosen = [index for index in range(len(sizes)) if index % 5 != 3] or [0]
    batches = Batches(data, chosen, BatchOptions(tokens, seed), devices)
    seen: list[int] = []
    for shape, parts in batches.epoch(0):
        assert shape in batches.shapes
        assert len(parts) == devices
        assert shape.sequences * shape.length <= tokens
        batch = batches.load(shape, parts)
        assert batch.tokens.shape == (devices, shape.sequences, shape.length)
        assert batch.row.shape == (devices, shape.anchors)
        for device, part in enumerate(parts):
            seen += part
            real = batch.at[device] > 0
            assert real.sum() == sum(sizes[sample][1] for sample in part)
            rows = batch.tokens[device].reshape(-1)
            # The token of an anchor is in the row after the anchor's.
            np.testing.assert_array_equal(
                rows[batch.row[device][real] + 1], batch.token[device][real]
            )
            np.testing.assert_array_equal(
                batch.row[device][real] % shape.length + 1, batch.at[device][real]
            )
            for place, sample in enumerate(part):
                text = batch.tokens[device, place]
                assert (text[: sum(sizes[sample])] == sample + 1).all()
                assert not text[sum(sizes[sample]) :].any()
    assert sorted(seen) == chosen


def test_epochs_differ_and_repeat() -> None:
    data = dataset([(4, 20 + index % 30) for index in range(200)])
    batches = Batches(data, range(200), BatchOptions(1024, 1), 1)
    assert batches.epoch(0) != batches.epoch(1)
    again = Batches(data, range(200), BatchOptions(1024, 1), 1)
    assert again.epoch(1) == batches.epoch(1)
    assert Batches(data, range(200), BatchOptions(1024, 2), 1).epoch(0) != batches.epoch(0)


def test_padded_lengths() -> None:
    assert [padded_length(length) for length in (1, 64, 65, 129, 193, 257, 400, 513, 1025)] == [
        64,
        64,
        128,
        192,
        256,
        384,
        512,
        768,
        1536,
    ]
    for length in range(65, 3000):
        padded = padded_length(length)
        assert length <= padded <= 2 * length
        assert padded % 64 == 0


def test_rare_lengths_are_padded_to_the_next() -> None:
    data = dataset([(10, 20)] * 2 + [(10, 90)] + [(40, 140)] * 100 + [(60, 300)])
    batches = Batches(data, range(104), BatchOptions(1024), 1)
    # Two of 64, then three of 128 among 20,000 tokens; the longest stay what they are.
    assert [shape.length for shape in batches.shapes] == [192, 384]
    seen = [sample for _, parts in batches.epoch(0) for sample in parts[0]]
    assert sorted(seen) == list(range(104))


def test_capacities_suit_the_responses() -> None:
    data = dataset([(40, 20)] * 600)
    (shape,) = Batches(data, range(600), BatchOptions(32768), 1).shapes
    assert (shape.sequences, shape.length) == (512, 64)
    assert shape.anchors % ANCHORS_AT_ONCE == 0
    assert 512 * 20 <= shape.anchors <= 512 * 24


def test_refused() -> None:
    data = dataset([(40, 100)])
    with pytest.raises(ConfigError, match="batch_tokens must be >= 192 for samples of 140 tokens"):
        Batches(data, [0], BatchOptions(128), 1)
    with pytest.raises(ConfigError, match="no samples to train on"):
        Batches(data, [], BatchOptions(), 1)
    with pytest.raises(ConfigError, match=r"batch_tokens must be in \[64, "):
        BatchOptions(10)
