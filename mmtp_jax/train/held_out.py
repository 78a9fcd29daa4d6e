"""Samples that training does not see, and how well the modules draft them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from mmtp_jax.engine.stats import Acceptance
from mmtp_jax.models.model import Params
from mmtp_jax.sampling.state import NEUTRAL_ROW
from mmtp_jax.train.drafts import Drafts, tokens_per_verification, walk
from mmtp_jax.train.shards import Dataset

_BUCKETS = 1 << 16


@dataclass(frozen=True, eq=False)
class Split:
    """Indices of samples: those to train on, and greedy ones of other prompts."""

    trained: Int64[np.ndarray, " X"]
    held_out: Int64[np.ndarray, " Y"]


def split(data: Dataset, held_out: int) -> Split:
    """About `held_out` greedy samples, chosen by a hash of their prompts; all samples of these
    prompts are left out of training."""
    greedy = np.flatnonzero(data.temperatures == 0)
    if held_out == 0 or len(greedy) == 0:
        return Split(np.arange(len(data)), np.zeros(0, np.int64))
    hashed = np.array(
        [
            zlib.crc32(data.tokens(index)[: data.prompt_lengths[index]].tobytes()) % _BUCKETS
            for index in range(len(data))
        ]
    )
    left_out = hashed < _BUCKETS * min(held_out / len(greedy), 0.5)
    return Split(np.flatnonzero(~left_out), greedy[left_out[greedy]][:held_out])


@dataclass(frozen=True)
class Progress:
    """Of greedy texts that were not trained on: tokens per verification, and by position the drafts
    accepted of those verified."""

    tokens_per_step: float
    acceptance: tuple[float, ...]


def progress(
    drafts: Drafts, params: Params, data: Dataset, chosen: Int64[np.ndarray, " Y"]
) -> Progress:
    """How the modules draft the chosen samples, all greedy."""
    acceptance: Acceptance | None = None
    rows = np.tile(NEUTRAL_ROW, (len(chosen), 1))
    samples = chosen.tolist()
    for place, hits in drafts.hits(params, data, samples, rows):
        acceptance = acceptance or Acceptance(len(hits))
        prompt = int(data.prompt_lengths[samples[place]])
        # Whether a stop token or the limit ended the text changes only what is said of its end.
        walk(hits, prompt, stopped=True, acceptance=acceptance)
    assert acceptance is not None
    return Progress(tokens_per_verification(acceptance), tuple(acceptance.rates))
