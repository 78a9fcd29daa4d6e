"""How sampling parameters live on the device: one packed row per slot, and a row of logit biases.

A row is int32 [`ROW_SIZE`] and can travel inside a step plan: `FLOATS` as float32 bits, `INTS`,
then the stop ids padded with -1. Dims: R slots, S rows of a step, V vocabulary,
C = `ROW_SIZE`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float32, Int32, UInt32

from mmtp_jax.sampling.params import INT32_MAX, MAX_STOP_IDS, SamplingParams
from pallas_kernels.choose_token import FLOATS, INTS, STOP_IDS

_HAS_BIAS = len(FLOATS) + INTS.index("has_bias")
ROW_SIZE = STOP_IDS + MAX_STOP_IDS


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingState:
    """Parameters of every slot; a row of `bias` counts only where has_bias is set in its row.

    `masks` (one bit per token, the lowest bit of a word first) say which tokens may be chosen at
    the W indices from `mask_start` on; -1 there: any, at every index.
    """

    rows: Int32[Array, "R C"]
    bias: Float32[Array, "R V"]
    masks: Int32[Array, "R W words"]
    mask_start: Int32[Array, " R"]


class RowParams(NamedTuple):
    """The parameters of each row of a step, unpacked."""

    temperature: Float32[Array, " S"]  # 0: greedy
    top_p: Float32[Array, " S"]  # 1: off
    min_p: Float32[Array, " S"]  # 0: off
    presence: Float32[Array, " S"]
    frequency: Float32[Array, " S"]
    repetition: Float32[Array, " S"]
    top_k: Int32[Array, " S"]  # 0: off
    seed: UInt32[Array, " S"]
    prompt_len: Int32[Array, " S"]  # the index of the first output token
    min_len: Int32[Array, " S"]  # stop ids are banned at indices below this one
    has_bias: Bool[Array, " S"]
    stop_ids: Int32[Array, "S 16"]  # -1: none


def _pack(
    floats: tuple[float, ...], ints: tuple[int, ...], stop_ids: tuple[int, ...]
) -> Int32[np.ndarray, " C"]:
    row = np.full(ROW_SIZE, -1, np.int32)
    row[: len(FLOATS)] = np.array(floats, np.float32).view(np.int32)
    row[len(FLOATS) : STOP_IDS] = np.array(ints, np.int32)
    row[STOP_IDS : STOP_IDS + len(stop_ids)] = stop_ids
    return row


NEUTRAL_ROW = _pack((0.0, 1.0, 0.0, 0.0, 0.0, 1.0), (0,) * len(INTS), ())
"""Greedy, with every option off; what empty slots and padding rows have."""
NEUTRAL_ROW.flags.writeable = False


def empty(num_slots: int, vocab_size: int, width: int = 1) -> SamplingState:
    """A state whose slots are all neutral; `width` indices of a request can be masked at once."""
    return SamplingState(
        rows=jnp.tile(jnp.asarray(NEUTRAL_ROW), (num_slots, 1)),
        bias=jnp.zeros((num_slots, vocab_size), jnp.float32),
        masks=jnp.zeros((num_slots, width, -(-vocab_size // 32)), jnp.int32),
        mask_start=jnp.full(num_slots, -1, jnp.int32),
    )


def host_row(
    params: SamplingParams, seed: int, prompt_len: int, eos_token_ids: Iterable[int] = ()
) -> Int32[np.ndarray, " C"]:
    """The packed row of a request: `seed` (its low 32 bits count) is the one resolved for this
    sample, `prompt_len` the tokens before its output. Raises `ConfigError` for too many stop ids.
    """
    # A greedy request needs no filter: the best token passes each of them. A top_p that float32
    # rounds to 0 would keep nothing, while any value below 1/V keeps just the best token.
    filters = (
        (0.0, 1.0, 0.0)
        if params.greedy
        else (params.temperature, max(params.top_p, 1e-9), params.min_p)
    )
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    ints = (
        0 if params.greedy else max(params.top_k, 0),
        int(np.uint32(seed % 2**32).view(np.int32)),
        prompt_len,
        min(prompt_len + params.min_tokens, INT32_MAX),
        0,
    )
    return _pack((*filters, *penalties), ints, params.stop_ids(eos_token_ids))


def bias_row(params: SamplingParams, vocab_size: int) -> Float32[np.ndarray, " V"] | None:
    """What a request adds to its logits, -inf for tokens it may not use; None if nothing."""
    if not params.logit_bias and params.allowed_token_ids is None and not params.banned_token_ids:
        return None
    row = np.zeros(vocab_size, np.float32)
    if params.allowed_token_ids is not None:
        row[:] = -np.inf
        row[list(params.allowed_token_ids)] = 0.0
    row[list(params.banned_token_ids)] = -np.inf
    for token, value in (params.logit_bias or {}).items():
        row[token] += value
    return row


def write_slot(
    state: SamplingState,
    slot: Int32[Array, "*A"] | int,
    row: Int32[Array | np.ndarray, "*A C"],
) -> SamplingState:
    """Give `slot` (or different ones) the packed `row`, no bias and no masks. A slot past the end
    writes nothing."""
    return dataclasses.replace(
        state,
        rows=state.rows.at[slot].set(row, mode="drop"),
        mask_start=state.mask_start.at[slot].set(-1, mode="drop"),
    )


def write_bias(
    state: SamplingState, slot: Int32[Array, ""] | int, bias: Float32[Array | np.ndarray, " V"]
) -> SamplingState:
    """Give `slot` a bias row; call it after `write_slot`. A slot past the end writes nothing."""
    return dataclasses.replace(
        state,
        rows=state.rows.at[slot, _HAS_BIAS].set(1, mode="drop"),
        bias=state.bias.at[slot].set(bias, mode="drop"),
    )


def write_masks(
    state: SamplingState,
    slots: Int32[Array, " M"],
    starts: Int32[Array, " M"],
    masks: Int32[Array, "M W words"],
) -> SamplingState:
    """Give each of `slots` masks for the indices from its start on. Slots past the end write
    nothing."""
    return dataclasses.replace(
        state,
        masks=state.masks.at[slots].set(masks, mode="drop"),
        mask_start=state.mask_start.at[slots].set(starts, mode="drop"),
    )


def without_masks(state: SamplingState) -> SamplingState:
    """The same parameters with nothing masked."""
    return dataclasses.replace(state, mask_start=jnp.full_like(state.mask_start, -1))


def mask_column(
    state: SamplingState, slot: Int32[Array, " S"], index: Int32[Array, " S"]
) -> Int32[Array, " S"]:
    """Which of its slot's masks holds at each row's index; -1 for none (padding rows too)."""
    num_slots, width = state.masks.shape[:2]
    start = state.mask_start.at[slot].get(mode="clip")
    column = index - start
    is_slot = (slot >= 0) & (slot < num_slots)
    is_masked = is_slot & (start >= 0) & (column >= 0) & (column < width)
    return jnp.where(is_masked, column, -1)


def params_of(state: SamplingState, slot: Int32[Array, " S"]) -> RowParams:
    """The parameters of each row's slot; neutral ones where `slot` is no slot (padding rows)."""
    num_slots = state.rows.shape[0]
    is_slot = (slot >= 0) & (slot < num_slots)
    rows = jnp.where(is_slot[:, None], state.rows.at[slot].get(mode="clip"), NEUTRAL_ROW)
    floats = lax.bitcast_convert_type(rows[:, : len(FLOATS)], jnp.float32)
    temperature, top_p, min_p, presence, frequency, repetition = floats.T
    top_k, seed, prompt_len, min_len, has_bias = rows[:, len(FLOATS) : STOP_IDS].T
    return RowParams(
        temperature=temperature,
        top_p=top_p,
        min_p=min_p,
        presence=presence,
        frequency=frequency,
        repetition=repetition,
        top_k=top_k,
        seed=lax.bitcast_convert_type(seed, jnp.uint32),
        prompt_len=prompt_len,
        min_len=min_len,
        has_bias=has_bias != 0,
        stop_ids=rows[:, STOP_IDS:],
    )
