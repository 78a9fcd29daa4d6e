"""Drafts that are accepted with a given probability, whatever the modules would propose.

The greedy text of every request is known from a run before. Each index of each request proposes its
true token with probability P, independently, and another one otherwise. An index is verified as a
draft at most once, so the accepted drafts of a step are those of k independent trials. The emitted
text stays the target's own: a draft only says how much of it a step may emit.

The proposals lie in the requests' histories on the device, beyond their newest tokens: the compiled
step reads them there, so one program serves every probability.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from mmtp_jax.engine.state import EngineState
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


def propose_history(
    logits: Array, sampling: SamplingState, slot: Array, index: Array, history: Array
) -> Array:
    """A `Chooser` of whatever the request's history holds at the index already. The modules run,
    and choose, all the same."""
    own = sample(logits, sampling, slot, index, history)
    # Never true, which the compiler cannot know: the modules' work stays in the program.
    return jnp.where(own < 0, own, history.at[slot, index].get(mode="clip"))


def enter(state: EngineState, table: np.ndarray, first: np.ndarray) -> EngineState:
    """The state with `table`'s proposals in the history, from index `first` [requests] on, which
    must lie beyond all tokens."""
    num_slots, width = state.tokens.shape
    rows, columns = table.shape
    padded = np.pad(table, ((0, num_slots - rows), (0, width - columns)))
    start = np.pad(first, (0, num_slots - rows), constant_values=width)
    beyond = np.arange(width) >= start[:, None]
    return dataclasses.replace(state, tokens=jnp.where(beyond, padded, state.tokens))


def expected_tokens_per_step(probability: float, num_drafts: int) -> float:
    """1 + P + ... + P^k (arXiv 2211.17192, equation 1)."""
    return sum(probability**count for count in range(num_drafts + 1))
