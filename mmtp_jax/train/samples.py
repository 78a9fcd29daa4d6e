"""Which samples to draw of the prompts, with what seeds, and in which shards. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int64

from mmtp_jax.checks import check_types
from mmtp_jax.config import require
from mmtp_jax.sampling.params import GREEDY_BELOW, SamplingParams, default_seed, sample_seed


@dataclass(frozen=True)
class GenerateOptions:
    """What to draw of every prompt: one greedy sample if `temperatures` has a 0, and `samples` of
    every other temperature. Responses end at `max_tokens`; prompts of more than `max_prompt_len`
    tokens are left out. `shard_size` counts samples."""

    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    samples: int = 1
    max_tokens: int = 512
    max_prompt_len: int = 512
    shard_size: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("samples", "max_tokens", "max_prompt_len", "shard_size"):
            require(getattr(self, name) >= 1, f"{name} must be >= 1, got {getattr(self, name)}")
        require(0 <= self.seed < 2**31, f"seed must be in [0, 2**31), got {self.seed}")
        require(bool(self.temperatures), "temperatures must hold at least one temperature")
        require(
            len(set(self.temperatures)) == len(self.temperatures),
            f"temperatures must differ from each other, got {self.temperatures}",
        )
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature, max_tokens=self.max_tokens)

    @property
    def variants(self) -> tuple[float, ...]:
        """The temperature of every sample of one prompt."""
        return tuple(
            temperature
            for temperature in self.temperatures
            for _ in range(1 if temperature < GREEDY_BELOW else self.samples)
        )


@dataclass(frozen=True)
class SamplePlan:
    """The samples of all prompts, numbered prompt by prompt, and their shards.

    A shard holds samples of a fixed shuffle, so every shard mixes prompts and temperatures.
    """

    num_prompts: int
    options: GenerateOptions

    @property
    def num_samples(self) -> int:
        return self.num_prompts * len(self.options.variants)

    @property
    def num_shards(self) -> int:
        return -(-self.num_samples // self.options.shard_size)

    def shard(self, index: int) -> Int64[np.ndarray, " S"]:
        """The numbers of a shard's samples, in their order there."""
        size = self.options.shard_size
        return self._order[index * size : (index + 1) * size]

    def prompt(self, number: int) -> int:
        """Which prompt a sample is of."""
        return number // len(self.options.variants)

    def temperature(self, number: int) -> float:
        """What temperature a sample is drawn at."""
        variants = self.options.variants
        return variants[number % len(variants)]

    def seed(self, number: int) -> int:
        """What keys a sample's noise: nothing but the seed of the options and its number."""
        return sample_seed(default_seed(self.options.seed, number), 0)

    @cached_property
    def _order(self) -> Int64[np.ndarray, " S"]:
        return np.random.default_rng(self.options.seed).permutation(self.num_samples)
