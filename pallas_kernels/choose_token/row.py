"""A request's packed parameters, an int32 row: floats as their bits, then integers, then stop ids
padded with -1; and how a program of the kernel reads its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
INTS = ("top_k", "seed", "prompt_len", "min_len", "has_bias")
STOP_IDS = len(FLOATS) + len(INTS)
"""The first column of the stop ids."""


@dataclass(frozen=True)
class Options:
    """The parameters of a row of a step, all scalars; without a slot, none has an effect."""

    slot: Array
    is_slot: Array
    index: Array
    mask: Array  # of the slot's masks, the one that holds at the index; 0 if none
    is_masked: Array
    temperature: Array
    top_p: Array
    min_p: Array
    presence: Array
    frequency: Array
    repetition: Array
    top_k: Array
    seed: Array
    prompt_len: Array
    min_len: Array
    has_bias: Array

    @property
    def has_penalties(self) -> Array:
        return (self.repetition != 1) | (self.presence != 0) | (self.frequency != 0)

    @property
    def is_short(self) -> Array:
        """Whether stop ids are banned."""
        return self.index < self.min_len

    @property
    def is_sampled(self) -> Array:
        return self.is_slot & (self.temperature > 0)

    @property
    def is_filtered(self) -> Array:
        return self.is_sampled & ((self.min_p > 0) | (self.top_k > 0) | (self.top_p < 1))

    @property
    def is_edited(self) -> Array:
        """Whether anything but the temperature changes the logits."""
        edits = self.is_masked | (self.has_bias != 0) | self.is_short | self.has_penalties
        return self.is_slot & edits

    @property
    def divisor(self) -> Array:
        return jnp.where(self.is_sampled, self.temperature, 1.0)


def read_options(
    rows_ref: Any, mask_start_ref: Any, slot: Array, index: Array, num_masks: int
) -> Options:
    is_slot = (slot >= 0) & (slot < rows_ref.shape[0])
    slot = jnp.where(is_slot, slot, 0)
    mask_start = mask_start_ref[slot]
    mask = index - mask_start
    is_masked = (mask_start >= 0) & (mask >= 0) & (mask < num_masks)
    values = {name: rows_ref[slot, column] for column, name in enumerate(FLOATS + INTS)}
    for name in FLOATS:
        values[name] = lax.bitcast_convert_type(values[name], jnp.float32)
    values["seed"] = lax.bitcast_convert_type(values["seed"], jnp.uint32)
    return Options(slot, is_slot, index, jnp.where(is_masked, mask, 0), is_masked, **values)
