"""A slow numpy model of one row of the sampler, and how tests put requests into slots."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.sampling.state import SamplingState, bias_row, empty, host_row, write_bias, write_slot


def make_state(
    requests: Sequence[SamplingParams],
    vocab_size: int,
    prompt_lens: Sequence[int] | int = 0,
    eos_token_ids: Sequence[int] = (),
    width: int = 1,
) -> SamplingState:
    """A state with one slot per request; the seed of a request is its own, or else its slot."""
    state = empty(len(requests), vocab_size, width)
    for slot, params in enumerate(requests):
        prompt_len = prompt_lens if isinstance(prompt_lens, int) else prompt_lens[slot]
        seed = slot if params.seed is None else params.seed
        state = write_slot(state, slot, host_row(params, seed, prompt_len, eos_token_ids))
        bias = bias_row(params, vocab_size)
        if bias is not None:
            state = write_bias(state, slot, bias)
    return state


def int32(*values: int) -> jnp.ndarray:
    return jnp.array(values, jnp.int32)


def processed(
    logits: np.ndarray,
    params: SamplingParams,
    history: Sequence[int],
    prompt_len: int,
    eos_token_ids: Sequence[int] = (),
) -> np.ndarray:
    """The float64 logits of the token after `history` [index], option by option, token by token."""
    scores = np.array(logits, np.float64)
    output = list(history)[prompt_len:]
    for token in range(len(scores)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            scores[token] = -np.inf
        if token in params.banned_token_ids:
            scores[token] = -np.inf
        scores[token] += (params.logit_bias or {}).get(token, 0.0)
        if len(output) < params.min_tokens and token in params.stop_ids(eos_token_ids):
            scores[token] = -np.inf
        if token in history:
            penalty = params.repetition_penalty
            scores[token] *= 1 / penalty if scores[token] > 0 else penalty
        scores[token] -= params.frequency_penalty * output.count(token)
        scores[token] -= params.presence_penalty * (token in output)
    return scores if params.greedy else scores / params.temperature


def probabilities(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution of a sampled token, from processed scores, by sorting."""
    weights = np.exp(scores - scores.max())
    weights[weights < params.min_p * weights.max()] = 0.0
    best_first = np.argsort(-scores, kind="stable")
    if params.top_k > 0:
        weights[best_first[params.top_k :]] = 0.0
    weights /= weights.sum()
    if params.top_p < 1:
        mass_before = np.cumsum(weights[best_first]) - weights[best_first]
        weights[best_first[mass_before >= params.top_p]] = 0.0
    return weights / weights.sum()
