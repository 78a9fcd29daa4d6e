"""Drafts that are accepted with a given probability, whatever the modules would propose.

The greedy text of every request is known from a run before. Each index of each request proposes its
true token with probability P, independently, and another one otherwise. An index is verified as a
draft at most once, so the accepted drafts of a step are those of k independent trials. The emitted
text stays the target's own: a draft only says how much of it a step may emit.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from mmtp_jax.engine.step import Chooser
from mmtp_jax.sampling.sampler import sample
from mmtp_jax.sampling.state import SamplingState


def proposals(
    texts: Sequence[Sequence[int]], probability: float, vocab_size: int, seed: int
) -> np.ndarray:
    """int32 [requests, longest text]: what to draft at every index of every request."""
    table = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in zip(table, texts, strict=True):
        row[: len(text)] = text
    # The coin of (seed, request, index); probability 1 accepts all of [0, 1).
    wrong = np.random.default_rng(seed).random(table.shape) >= probability
    return np.where(wrong, (table + 1) % vocab_size, table).astype(np.int32)


def chooser(table: np.ndarray) -> Chooser:
    """Drafts `table[slot, index]`; the modules run, and choose, all the same."""
    drafts = jnp.asarray(table)

    def choose(
        logits: Array, sampling: SamplingState, slot: Array, index: Array, history: Array
    ) -> Array:
        own = sample(logits, sampling, slot, index, history)
        # Never true, which the compiler cannot know: the modules' work stays in the program.
        return jnp.where(own < 0, own, drafts.at[slot, index].get(mode="clip"))

    return choose


def expected_tokens_per_step(probability: float, num_drafts: int) -> float:
    """1 + P + ... + P^k (arXiv 2211.17192, equation 1)."""
    return sum(probability**count for count in range(num_drafts + 1))
